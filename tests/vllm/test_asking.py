"""How the cache is asked for, and what is said when it cannot be used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SEAMS = """
import json
from torchwcache_vllm import versions
before = versions.seam_problems()
import vllm.model_executor.model_loader.utils as utils
utils.initialize_model = lambda config: None
del utils.process_weights_after_loading
print(json.dumps([before, versions.seam_problems()]))
"""


CHANGED = """
import vllm.model_executor.model_loader as package
from vllm.config.load import LoadConfig
from vllm.plugins import load_general_plugins
{change}
load_general_plugins()
print("went on")
{then}
"""
KIND = 'print(type(package.get_model_loader(LoadConfig(load_format="torchwcache"))).__name__)'

EVERY_FORMAT = """
import json
import logging
import typing

import vllm.v1.worker.gpu_model_runner as runner  # has get_model_loader by its name before the plugin is there
import vllm.model_executor.model_loader as package
from vllm.config.load import LoadConfig
from vllm.plugins import load_general_plugins

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("vllm.torchwcache").addHandler(handler)
load_general_plugins()
found = {}
for name in (*typing.get_args(package.LoadFormats), "torchwcache"):
    said.clear()
    raised = ""
    for place in (runner, package):
        try:
            place.get_model_loader(LoadConfig(load_format=name))
        except Exception as error:  # some of them need options, or packages that are not here
            raised = type(error).__name__
    found[name] = ([line for line in said if "asks for the cache" in line], raised)
print(json.dumps(found))
"""


def script(text, **environment):
    """Run it; returns the last line that it prints, and all that it logs."""
    done = subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )
    return (done.stdout.splitlines() or [""])[-1], done.stdout + done.stderr


def test_a_load_format_is_registered_by_vllms_own_function():
    """The table behind it is vLLM's own; a release may call it something else."""
    change = "package._FORMATS = package._LOAD_FORMAT_TO_MODEL_LOADER; del package._LOAD_FORMAT_TO_MODEL_LOADER"
    functions = """
def register_model_loader(load_format):
    return lambda cls: package._FORMATS.setdefault(load_format, cls)
package.register_model_loader = register_model_loader
package.get_model_loader = lambda config: package._FORMATS[config.load_format](config)
"""
    last, log = script(CHANGED.format(change=change + functions, then=KIND))
    assert last == "TorchwcacheModelLoader", log


@pytest.mark.parametrize("change", ["del package._LOAD_FORMAT_TO_MODEL_LOADER", "del package.register_model_loader"])
def test_a_change_of_vllms_does_not_stop_engines_that_never_asked(change):
    last, log = script(CHANGED.format(change=change, then=""))
    assert last == "went on"
    assert "this vLLM has changed where torchwcache plugs in" in log
    assert "`--load-format torchwcache` is not known" in log
    asked = {"TORCHWCACHE_MODE": "daemon", "TORCHWCACHE_FALLBACK": "error"}
    last, log = script(CHANGED.format(change=change, then=""), **asked)
    assert last != "went on"
    assert "RefusedError" in log


def test_every_other_load_format_is_noticed():
    last, log = script(EVERY_FORMAT, TORCHWCACHE_MODE="daemon")
    found = json.loads(last)
    assert {"tensorizer", "modelexpress", "ipc_cache", "auto"} <= set(found), log
    assert {name: len(said) for name, (said, _) in found.items()} == {name: int(name != "torchwcache") for name in found}
    assert "--load-format tensorizer" in found["tensorizer"][0][0]
    last, log = script(EVERY_FORMAT, TORCHWCACHE_MODE="daemon", TORCHWCACHE_FALLBACK="error")
    assert {name for name, (_, raised) in json.loads(last).items() if raised != "RefusedError"} == {"torchwcache"}, log


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
