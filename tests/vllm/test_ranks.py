"""Engines of several ranks: each rank has an entry of its own, and all attach or all load."""

from __future__ import annotations

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
