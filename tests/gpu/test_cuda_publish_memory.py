"""What a publish takes of a GPU's memory beside the weights, and a GPU that is full."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import gpu_worker

from torchwcache.memory.select import memory_for

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SLACK_NBYTES = 64 * MIB
"""Blocks of torch's allocator that are freed only as a whole, and what the driver keeps for page tables."""


def patch_allocate(here, device, replacement):
    """Have ``replacement(allocate, number, nbytes)`` called for the making of each segment."""
    kind = type(memory_for(device))
    allocate, calls = kind.allocate, []

    def counted(self, nbytes, **options):
        calls.append(nbytes)
        return replacement(lambda: allocate(self, nbytes, **options), len(calls) - 1, nbytes)

    here.patch(kind, "allocate", counted)
    return calls


def publish_and_measure(here, *, cfg):
    """Publish, and look at the GPU's free memory all the time, and whenever a segment was just made."""
    start = gpu_worker.free_nbytes(here)
    lowest, stop = [start], threading.Event()

    def look():
        lowest[0] = min(lowest[0], torch.cuda.mem_get_info()[0])

    def look_all_the_time():
        while not stop.is_set():
            look()
            time.sleep(0.0005)

    def make(allocate, number, nbytes):
        segment = allocate()
        look()
        return segment

    segments = patch_allocate(here, cfg["device"], make)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(look_all_the_time)
        try:
            report = gpu_worker.publish(here, cfg=cfg)
        finally:
            stop.set()
    after = gpu_worker.free_nbytes(here)
    return {"report": report, "extra": start - lowest[0], "left": start - after, "segments": segments}


def test_publishing_takes_one_segment_beside_the_weights(alone, workers, daemon, big):
    cfg = {**big, "build_kwargs": {"layers": 512}}  # 2 GiB
    publisher, client = workers.several(2)
    publisher.do(gpu_worker.make, cfg=cfg)
    before, answer = publisher.do(gpu_worker.state), publisher.do(gpu_worker.output)
    found = publisher.do(publish_and_measure, cfg=cfg)
    assert found["report"]["mapped_nbytes"] == 511 * 4 * MIB
    assert len(found["segments"]) > 4
    assert found["extra"] <= max(found["segments"]) + SLACK_NBYTES
    assert found["left"] <= SLACK_NBYTES
    assert (publisher.do(gpu_worker.state), publisher.do(gpu_worker.output)) == (before, answer)
    client.do(gpu_worker.attach, cfg=cfg, variant="v")
    assert (client.do(gpu_worker.state), client.do(gpu_worker.output)) == (before, answer)


# ---- a full GPU --------------------------------------------------------------------------------------------------------------


def fill(here, *, device, leave):
    """Take all of the GPU's memory but so many bytes, and up to 16 MiB."""
    ballast = here.kept.setdefault("ballast", [])
    gpu_worker.free_nbytes(here)
    for nbytes in (1024 * MIB, 16 * MIB):
        while torch.cuda.mem_get_info()[0] - nbytes >= leave:
            ballast.append(torch.empty(nbytes, dtype=torch.uint8, device=device))


def empty(here):
    here.kept.pop("ballast", None)
    return gpu_worker.free_nbytes(here)


def publish_on_a_full_gpu(here, *, cfg, nbytes, when):
    """Let a publish find less than a segment free: before it begins, or when it makes one of its segments."""
    memory = memory_for(cfg["device"])
    segment = memory.segment_nbytes(nbytes)
    last = -(-nbytes // segment) - 1
    if when == "before":
        fill(here, device=cfg["device"], leave=segment // 2)
        return gpu_worker.publish(here, cfg=cfg)
    at = {"first": 0, "second": 1, "last": last}[when]

    def make(allocate, number, nbytes):
        if number == at:
            fill(here, device=cfg["device"], leave=nbytes // 2)
        return allocate()

    patch_allocate(here, cfg["device"], make)
    return gpu_worker.publish(here, cfg=cfg)


def descriptors(here):
    return gpu_worker.usage()["fds"]


@pytest.mark.parametrize("when", ["before", "first", "second", "last"])
def test_a_publish_that_finds_no_memory(when, alone, watcher, workers, daemon, big):
    layers = 80
    cfg, nbytes = {**big, "build_kwargs": {"layers": layers}}, (layers - 1) * 4 * MIB
    publisher = workers()
    publisher.do(gpu_worker.warm_up, device=big["device"])
    empty_gpu = watcher.do(gpu_worker.free_nbytes)
    publisher.do(gpu_worker.make, cfg=cfg)
    before, answer = publisher.do(gpu_worker.state), publisher.do(gpu_worker.output)
    fds, start = publisher.do(descriptors), publisher.do(empty)

    error = publisher.fails(publish_on_a_full_gpu, cfg=cfg, nbytes=nbytes, when=when)
    assert error.type == "SegmentMemoryError"
    assert "nothing was published" in error.text
    assert publisher.do(gpu_worker.state) == before, "the model is as it was"
    after = publisher.do(empty)
    assert publisher.do(gpu_worker.output) == answer, "and works"
    assert watcher.do(gpu_worker.entries) == []
    assert publisher.do(descriptors) == fds
    assert after > start - SLACK_NBYTES
    publisher.do(gpu_worker.close_all)
    assert watcher.do(gpu_worker.free_nbytes) > empty_gpu - SLACK_NBYTES, "nothing is left behind"


def test_there_is_room_again_afterwards(alone, workers, daemon, big):
    cfg = {**big, "build_kwargs": {"layers": 80}}
    publisher, client = workers.several(2)
    publisher.do(gpu_worker.make, cfg=cfg)
    answer = publisher.do(gpu_worker.output)
    publisher.fails(publish_on_a_full_gpu, cfg=cfg, nbytes=79 * 4 * MIB, when="second")
    publisher.do(empty)
    publisher.do(stop_filling)
    assert publisher.do(gpu_worker.publish, cfg=cfg)["published"]
    client.do(gpu_worker.attach, cfg=cfg, variant="v")
    assert client.do(gpu_worker.output) == publisher.do(gpu_worker.output) == answer


def stop_filling(here):
    here.patches.close()


def test_a_client_needs_no_memory_for_the_weights(alone, watcher, workers, daemon, big):
    """On a GPU that is full but for a few MiB, a model of 1 GiB can be attached."""
    publisher, client = workers.several(2)
    publisher.do(gpu_worker.make, cfg=big)
    publisher.do(gpu_worker.publish, cfg=big)
    client.do(gpu_worker.warm_up, device=big["device"])
    answer = client.do(attach_once, cfg=big)  # and have the room that its kernels need
    assert answer == publisher.do(gpu_worker.output, name="published")
    watcher.do(fill, device=big["device"], leave=96 * MIB)
    assert client.do(gpu_worker.attach, cfg=big, variant="v")["source"] == "cache"
    assert client.do(gpu_worker.output) == answer
    watcher.do(empty)


def attach_once(here, *, cfg):
    gpu_worker.attach(here, cfg=cfg, variant="v", name="once")
    answer = gpu_worker.output(here, name="once")
    here.attachments.pop("once").close()
    here.models.pop("once")
    return answer
