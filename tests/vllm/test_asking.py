"""How the cache is asked for, and what is said when it cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys

SEAMS = """
import json
from torchwcache_vllm import versions
before = versions.seam_problems()
import vllm.model_executor.model_loader.utils as utils
utils.initialize_model = lambda config: None
del utils.process_weights_after_loading
print(json.dumps([before, versions.seam_problems()]))
"""


def test_the_seams_are_where_they_are_looked_for_and_a_change_is_noticed():
    done = subprocess.run([sys.executable, "-c", SEAMS], capture_output=True, text=True, timeout=120, check=True)
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before == []
    assert len(after) == 4
    assert "initialize_model takes no 'vllm_config'" in after[0]


def test_mode_off_is_plain_vllm(run, checkpoints):
    tokens, lines = run(checkpoints("small"), environment={"TORCHWCACHE_MODE": "off"})
    assert lines == ""
    assert tokens


def test_a_plugin_that_vllm_was_told_not_to_load(vllm, checkpoints):
    log = vllm(checkpoints("small"), environment={"VLLM_PLUGINS": "another"}).fails()
    assert "`torchwcache` is not supported" in log


def test_asked_for_by_environment_but_not_by_the_flag(vllm, checkpoints):
    engine = vllm(checkpoints("small"), options={"load_format": "auto"}, environment={"TORCHWCACHE_MODE": "daemon"})
    engine.result()
    assert "asks for the cache, but this engine was started with --load-format auto and loads by itself" in engine.log
    environment = {"TORCHWCACHE_MODE": "daemon", "TORCHWCACHE_FALLBACK": "error"}
    assert "loads by itself" in vllm(checkpoints("small"), options={"load_format": "auto"}, environment=environment).fails()


def test_no_daemon_in_client_mode(run, vllm, checkpoints):
    options = {"model_loader_extra_config": {"mode": "client"}}
    tokens, lines = run(checkpoints("small"), options=options)
    assert tokens
    assert "not published (DaemonUnavailable" in lines
    options = {"model_loader_extra_config": {"mode": "client", "on_unavailable": "error"}}
    assert "DaemonUnavailable" in vllm(checkpoints("small"), options=options).fails()


def test_keys_of_vllms_own_loader_pass_and_misspelt_ones_do_not(run, vllm, checkpoints):
    options = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 2, "timeout_s": 5}}
    _, lines = run(checkpoints("small"), options=options)
    assert "published" in lines
    log = vllm(checkpoints("small"), options={"model_loader_extra_config": {"on_mismatc": "error"}}).fails()
    assert "on_mismatc" in log
