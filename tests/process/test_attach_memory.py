"""Memory: what producing takes beyond the weights, and what attaching costs."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import plain_models, worker
from support.processes import holders_of, segments_of

MIB = 1 << 20
LAYERS = 80  # of 4 MiB each
SEGMENT_NBYTES = 64 * MIB
SLACK_NBYTES = 48 * MIB
"""Arenas of the allocator, buffers of readers, and what the interpreter makes meanwhile."""


@pytest.fixture
def wide(tmp_path):
    cfg = {
        "checkpoint": plain_models.save(plain_models.Wide, tmp_path / "wide.safetensors", layers=LAYERS),
        "build": "support.plain_models:Wide",
        "build_kwargs": {"layers": LAYERS},
    }
    yield cfg
    (tmp_path / "wide.safetensors").unlink()


def resident():
    """Bytes that this process keeps in memory and that are not just pages of files: its own, and those of segments."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def attach_and_measure(here, *, warm_up=None, **order):
    """Attach, and look every millisecond at how much more memory is in use than before."""
    if warm_up is not None:  # code and pools that the first load brings, whatever its size
        worker.attach(here, cfg=warm_up, name="warm up", mode="off")
        worker.close(here, name="warm up")
    gc.collect()
    before = resident()
    peak, stop = [before], threading.Event()

    def look():
        while not stop.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.001)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look)
        try:
            report = worker.attach(here, **order)
        finally:
            stop.set()
    return {"report": report, "peak": peak[0] - before, "after": resident() - before}


def test_producing_takes_the_weights_and_little_more(workers, daemon, wide, tmp_path):
    """Read straight into segments, nothing is in memory twice."""
    small = {"checkpoint": plain_models.save(plain_models.Wide, tmp_path / "s.safetensors", layers=1), "build": wide["build"]}
    one = workers.fresh()
    found = one.do(attach_and_measure, cfg=wide, warm_up={**small, "build_kwargs": {"layers": 1}})
    weights = found["report"]["mapped_nbytes"]
    assert found["report"]["published"]
    assert weights == LAYERS * 4 * MIB
    assert 0.9 * weights < found["peak"] < weights + SLACK_NBYTES
    assert found["after"] < weights + SLACK_NBYTES


def test_a_load_by_transformers_takes_the_weights_and_a_segment(workers, daemon, tmp_path):
    """What was loaded into memory of its own is moved storage by storage, and freed on the way."""
    one = workers.fresh()
    found = one.do(attach_big_llama, folder=str(tmp_path / "llama"))
    shutil.rmtree(tmp_path / "llama")
    weights = found["report"]["mapped_nbytes"]
    assert found["report"]["published"]
    assert weights > 300 * MIB
    assert 0.9 * weights < found["peak"] < weights + max(SEGMENT_NBYTES, weights // 16) + SLACK_NBYTES
    assert found["after"] < weights + SLACK_NBYTES


def attach_big_llama(here, *, folder):
    import torch
    import transformers as hf

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 8}

    def make(path, layers):
        with torch.device("meta"):
            model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=4096, num_hidden_layers=layers, **sizes))
        model.to_empty(device="cpu").save_pretrained(path)

    make(f"{folder}/small", 1)
    make(f"{folder}/big", 5)
    gc.collect()
    return attach_and_measure(here, cfg={"checkpoint": f"{folder}/big"}, warm_up={"checkpoint": f"{folder}/small"})


def test_attaching_takes_no_memory_before_it_is_read(workers, daemon, wide):
    one, other = workers.several(2)
    one.do(worker.attach, cfg=wide)
    found = other.do(attach_and_measure, cfg=wide)
    assert found["report"]["source"] == "cache"
    assert found["peak"] < 16 * MIB
    assert other.do(worker.output) == one.do(worker.output)


def evict_everything(here):
    from torchwcache import WeightCache

    found = WeightCache.connect().evict(everything=True)
    return [len(found.freed), len(found.pending), found.nbytes]


def test_eviction_gives_memory_back_when_the_last_holder_leaves(workers, daemon, linked, wait_until):
    one, other = workers.several(2)
    one.do(worker.attach, cfg=linked)
    other.do(worker.attach, cfg=linked)
    segments = segments_of(one.pid)
    assert segments == segments_of(other.pid)
    assert holders_of(segments) == {one.pid, other.pid, daemon.pid}
    assert other.do(evict_everything)[:2] == [0, 1]
    assert other.do(worker.entries)[0]["leases"] == 2
    one.do(worker.close)
    assert holders_of(segments) == {other.pid, daemon.pid}
    assert other.do(worker.output), "who holds it keeps it"
    other.do(worker.close)
    wait_until(lambda: holders_of(segments) == set(), what="nobody holds the memory any more")


def test_unleased_entries_make_room(workers, daemon, linked):
    """What nobody uses goes before anybody goes without."""
    one, other = workers.several(2)
    old = one.do(worker.attach, cfg=linked)
    one.do(worker.close)
    report = other.do(attach_when_memory_is_short, cfg={**linked, "dtype": "float64"})
    assert report["published"]
    assert [entry["key"] for entry in other.do(worker.entries)] == [report["fingerprint"]]
    assert one.do(worker.attach, cfg=linked)["fingerprint"] == old["fingerprint"]


def attach_when_memory_is_short(here, *, cfg):
    """Until something was evicted, no memory is left; then there is."""
    from torchwcache.memory.host import HostMemory
    from torchwcache.wire.client import DaemonConnection

    room, make_room = HostMemory.available_nbytes, DaemonConnection.make_room
    evicted = []

    def evict(self, device, *, nbytes):
        evicted.append(make_room(self, device, nbytes=nbytes))
        return evicted[-1]

    here.patch(DaemonConnection, "make_room", evict)
    here.patch(HostMemory, "available_nbytes", lambda self: room(self) if evicted and evicted[0].freed else 0)
    return worker.attach(here, cfg=cfg)
