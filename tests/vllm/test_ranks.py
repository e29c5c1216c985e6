"""Engines of several ranks: each rank has an entry of its own, and all attach or all load."""

from __future__ import annotations

import shutil

import pytest

from torchwcache.cache import DaemonCache

TWO = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks(axis, run, checkpoints, private_socket):
    model = checkpoints("dense")
    without, _ = run(model, options={"load_format": "auto", axis: 2}, environment=TWO, in_process=False)
    first, lines = run(model, options={axis: 2}, environment=TWO, in_process=False)
    assert sorted(line.split(",")[1] for line in lines.splitlines()) == [" rank 0 of 2", " rank 1 of 2"]
    assert lines.count("published") == 2
    second, lines = run(model, options={axis: 2}, environment=TWO, in_process=False)
    assert lines.count(": hit: ") == 2
    assert first == second == without

    if axis == "pipeline_parallel_size":
        return
    cache = DaemonCache(private_socket, start=False)
    before = sorted(entry.key for entry in cache.entries())
    assert len(before) == 2
    cache.evict(before[0])
    third, lines = run(model, options={axis: 2}, environment=TWO, in_process=False)
    assert lines.count("published") == 1  # both loaded; the one whose shard is there did not publish it again
    assert lines.count(": hit: ") == 1
    assert sorted(entry.key for entry in cache.entries()) == before
    assert third == first


def test_expert_parallel_ranks_publish_their_own_experts(vllm, checkpoints, private_socket):
    """As far as vLLM 0.32 goes on a CPU: there its worker dies at the first forward, with or without the cache."""
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    for said in ("published", ": hit: "):
        engine = vllm(checkpoints("moe"), options=options, environment=TWO, in_process=False)
        engine.fails()
        assert sum(said in line for line in engine.lines) == 2, engine.log[-4000:]
    keys = {entry.key for entry in DaemonCache(private_socket, start=False).entries()}
    assert len(keys) == 2


def test_one_shared_rank_keeps_all_from_writing(vllm, checkpoints, tmp_path):
    """Were only the rank that published to refuse, the engine would go on with shards of two models."""
    model = shutil.copytree(checkpoints("dense"), tmp_path / "model")
    engine = vllm(
        model,
        options={"tensor_parallel_size": 2},
        environment={**TWO, "TEST_NO_MEMORY_AT": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        in_process=False,
        wait=True,
    )
    tokens = engine.result()["tokens"]
    assert sum("bytes published" in line for line in engine.lines) == 1, engine.lines
    shutil.copy(checkpoints("dense", 1) / "model.safetensors", model / "model.safetensors")
    answer = engine.do(do="call", name="collective_rpc", args=["reload_weights"])
    assert "reloading weights in place is refused" in answer["error"]
    # No answer of a worker is left over, which the next call would get.
    assert engine.do(do="call", name="collective_rpc", args=["check_health"])["result"] == "[None, None]"
    answer = engine.do(do="call_in_workers", name="reload_weights")
    assert "reloading weights in place is refused" in answer["error"]
    assert "result" in engine.do(do="call", name="reset_prefix_cache")
    assert engine.do(do="generate")["tokens"] == tokens


def test_a_rank_that_dies_while_all_decide_ends_the_start(vllm, run, checkpoints, private_socket):
    model = checkpoints("dense")
    options = {"tensor_parallel_size": 2}
    engine = vllm(model, options=options, environment={**TWO, "TEST_DIE_AT": "1"}, in_process=False)
    log = engine.fails()
    assert "another rank is gone" in log
    assert not any("published" in line or ": hit: " in line for line in engine.lines)
    assert DaemonCache(private_socket, start=False).entries() == ()
    _, lines = run(model, options=options, environment=TWO, in_process=False)
    assert lines.count("published") == 2
