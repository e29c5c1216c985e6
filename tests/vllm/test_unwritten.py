"""A checkpoint that lacks something: vLLM serves what it loaded, and nobody else gets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from torchwcache.cache import DaemonCache

HERE = Path(__file__).parent


@pytest.fixture
def lacking(checkpoints, tmp_path):
    """A copy of a checkpoint without one tensor, or with zeros in its place."""

    def make(kind, name, how="without"):
        folder = tmp_path / f"{how}-{kind}"
        command = [sys.executable, str(HERE / "checkpoints.py"), how, str(checkpoints(kind)), str(folder), name]
        subprocess.run(command, check=True, timeout=120)
        return folder

    return make


def test_a_part_of_a_fused_weight(run, lacking, private_socket):
    name = "model.layers.0.self_attn.k_proj.weight"
    model = lacking("small", name)
    zeros, _ = run(lacking("small", name, "zeros"), options={"load_format": "auto"})
    first, lines = run(model)
    assert "not published (NotAFunctionOfCheckpointError" in lines
    assert "the load left 1 of the model's tensors without values, in whole or in part" in lines
    assert "does not hold them: model.layers.0.self_attn.qkv_proj.weight. See whether" in lines
    assert first == zeros
    second, lines = run(model)
    assert "RefusedError" in lines  # remembered; it is loaded as without the cache
    assert len(second) == len(first)
    assert DaemonCache(private_socket, start=False).entries() == ()


@pytest.mark.parametrize("stage", ["loaded", "finished"])
def test_one_expert_of_many_stops_the_start_when_that_is_asked_for(stage, vllm, lacking, private_socket):
    model = lacking("moe", "model.layers.1.mlp.experts.2.up_proj.weight")
    options = {"model_loader_extra_config": {"on_refused": "error"}}
    environment = {"TORCHWCACHE_VLLM_STAGE": stage}
    log = vllm(model, plain_linear=stage == "finished", options=options, environment=environment).fails()
    assert "the load left 1 of the model's tensors without values, in whole or in part" in log
    assert "w13_weight. See whether" in log
    assert DaemonCache(private_socket, start=False).entries() == ()
