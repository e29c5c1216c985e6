"""Every option of vLLM's is known, and hits or misses as it must."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def _table():
    spec = importlib.util.spec_from_file_location("vllm_options", HERE / "options.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_option(checkpoints, tmp_path):
    done = subprocess.run(
        [sys.executable, str(HERE / "options.py"), str(checkpoints("moe"))],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result, options = json.loads(line[7:]), _table()
    unknown = sorted(set(result["names"]) - options.LISTED)
    assert unknown == [], "say for each of these in tests/vllm/options.py whether it must hit or miss"
    wrong = {
        name: outcome
        for name, outcome in result["found"].items()
        if isinstance(outcome, str) or bool(outcome) is (name in options.HIT)
    }
    assert wrong == {}


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
