"""Every option of vLLM's is known, and hits or misses as it must."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def _table():
    spec = importlib.util.spec_from_file_location("vllm_options", HERE / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def walked(checkpoints):
    done = subprocess.run(
        [sys.executable, str(HERE / "options.py"), str(checkpoints("moe"))],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line[7:])


def test_every_option_is_listed_once(walked):
    options = _table()
    assert sorted(set(walked["names"]) - options.LISTED) == [], "say for each in tests/vllm/options.py whether it must hit or miss"
    lists = (options.HIT, options.MISS, options.NEUTRAL, options.COUNTING, options.NOWHERE)
    assert len(options.LISTED) == sum(map(len, lists))


def test_every_option_that_can_be_given_hits_or_misses_as_it_must(walked):
    options = _table()
    wrong = {
        name: outcome
        for name, outcome in walked["given"].items()
        if isinstance(outcome, str) or bool(outcome) is (name in options.HIT)
    }
    assert wrong == {}


def test_every_other_option_counts_or_not_where_the_config_keeps_it(walked):
    options, fields = _table(), walked["fields"]
    wrong = {}
    for name in (*options.NEUTRAL, *options.COUNTING):
        if name in walked["names"]:
            places = [options.PLACES[name]] if name in options.PLACES else [p for p in fields if p.split(".")[-1] == name]
            found = {place: fields.get(place, "is not there") for place in places}
            if list(found.values()) != [name in options.COUNTING]:
                wrong[name] = found
    assert wrong == {}


def test_every_field_of_the_config_counts_unless_it_is_named(walked):
    """Also those that no option sets by itself."""
    from torchwcache_vllm.identity import NOT_COUNTED

    counting = _table().COUNTING_ALL_THE_SAME

    def counts(path):
        part, *rest = path.split(".")
        named = NOT_COUNTED.get(part, ())
        return path in counting or not ("*" in named or (rest and rest[0] in named))

    assert {path: found for path, found in walked["fields"].items() if found is not counts(path)} == {}
    assert len(walked["fields"]) > 300


def test_every_variable_that_does_not_count_is_one_that_somebody_looked_at(walked):
    assert sorted(set(walked["variables"]) - _table().VARIABLES) == []
    assert "VLLM_PORT" in walked["variables"]


def test_what_must_hit_hits_in_the_real_engine(run, checkpoints):
    """The options change attributes all over the module; none of them may keep it from being the published one."""
    first, _ = run(checkpoints("small"))
    options = {
        "max_model_len": 96,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.5,
        "seed": 7,
        "block_size": 32,
        "enable_prefix_caching": False,
        "served_model_name": "another",
    }
    second, lines = run(checkpoints("small"), options=options)
    assert ": hit: " in lines
    assert first == second
    _, lines = run(checkpoints("small"), options={"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}})
    assert "rope_theta" in lines
    assert "published" in lines
