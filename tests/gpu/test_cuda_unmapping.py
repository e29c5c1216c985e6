"""The last tensor unmaps: after kernels that read it, outside stream captures, and without a word when the interpreter ends."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from support import gpu_worker, worker
from support.processes import TESTS
from support.worker import digest

pytestmark = pytest.mark.gpu

GIB = 1 << 30
SLACK_NBYTES = 64 << 20


def close_and_keep(here, *, cfg):
    """Close an attachment while one tensor is kept, then let go of that too; what is mapped each time."""
    gpu_worker.attach(here, cfg=cfg)
    gc.collect()
    gc.disable()  # the last tensor takes the memory along, whenever the next collection may be
    here.patches.callback(gc.enable)
    places = sorted(gpu_worker.addresses(here).values())
    kept = here.models["model"].block.weight
    before = digest(kept)
    worker.close(here)
    found = [digest(kept) == before, bool(gpu_worker.still_mapped(places))]
    del kept
    return [*found, bool(gpu_worker.still_mapped(places))]


@pytest.mark.parametrize("source", ["disk", "cache"])
def test_the_last_tensor_unmaps(source, workers, daemon, linked):
    one, other = workers.several(2)
    if source == "cache":
        other.do(gpu_worker.attach, cfg=linked)
    assert one.do(close_and_keep, cfg=linked) == [True, True, False]


def keep(here, *, path, name="model"):
    here.kept["tensor"] = here.models[name].get_parameter(path)


def let_go_of_it(here):
    return digest(here.kept.pop("tensor"))


def test_an_evicted_entry_is_freed_with_its_last_tensor(alone, watcher, workers, daemon, big):
    publisher, client = workers.several(2)
    for one in (publisher, client):
        one.do(gpu_worker.warm_up, device=big["device"])
    start = watcher.do(gpu_worker.free_nbytes)
    publisher.do(gpu_worker.make, cfg=big)
    publisher.do(gpu_worker.publish, cfg=big)
    client.do(gpu_worker.attach, cfg=big, variant="v")
    client.do(keep, path="layers.3.weight")

    def is_held():
        return watcher.do(gpu_worker.free_nbytes) < start - GIB // 32

    publisher.do(gpu_worker.close_all)
    assert is_held()
    assert client.do(gpu_worker.evict_everything) == [0, 1]
    client.do(worker.close)
    assert client.do(gpu_worker.entries) == []
    assert is_held(), "one tensor holds the segment it lies in"
    client.do(let_go_of_it)
    assert watcher.do(gpu_worker.free_nbytes) > start - SLACK_NBYTES


# ---- kernels and captures ----------------------------------------------------------------------------------------------------


def close_while_running(here, *, stream):
    """Queue kernels that read the weights behind one that takes long, and close while that runs."""
    model = here.models["model"]
    places = sorted(gpu_worker.addresses(here).values())
    with torch.no_grad():
        expected = gpu_worker.answer_of(model)
        inputs = gpu_worker.inputs_of(model)
        torch.cuda.synchronize()
        running = torch.cuda.Stream() if stream == "side" else torch.cuda.current_stream()
        with torch.cuda.stream(running):
            torch.cuda._sleep(2_000_000_000)
            answers = model(**inputs)
    del model
    was_running = not running.query()
    begin_s = time.monotonic()
    worker.close(here)
    gc.collect()
    waited_s = time.monotonic() - begin_s
    left = gpu_worker.still_mapped(places, within_s=10)
    torch.cuda.synchronize()
    equal = all(torch.equal(a, b) for a, b in zip(expected, answers, strict=True))
    return {"was running": was_running, "equal": equal, "left": left, "waited_s": waited_s}


@pytest.mark.parametrize("stream", ["default", "side"])
def test_unmapping_waits_for_kernels(stream, workers, daemon, linked):
    one = workers()
    one.do(gpu_worker.attach, cfg=linked)
    found = one.do(close_while_running, stream=stream)
    assert found["waited_s"] > 0.1
    assert (found["was running"], found["equal"], found["left"]) == (True, True, [])


def close_while_capturing(here, *, where):
    """Capture a graph, and let go of an attached model meanwhile."""
    places = sorted(gpu_worker.addresses(here).values())
    x = torch.arange(64, dtype=torch.float32, device=gpu_worker.device_of(here.models["model"]))
    gc.collect()
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        (x * 2 + 1).sum()
    torch.cuda.synchronize()

    def close():
        worker.close(here)
        gc.collect()

    errors = []

    def close_in_thread():
        try:
            close()
        except Exception as error:
            errors.append(repr(error))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        if where == "the capturing thread":
            close()
        else:
            thread = threading.Thread(target=close_in_thread)
            thread.start()
            thread.join(30)
            assert not thread.is_alive(), "letting go waits for the capture, which waits for it"
        y = y + 1
    left = gpu_worker.still_mapped(places, within_s=15)
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    return {"left": left, "answer": y.tolist() == [11.0] * 64, "errors": errors}


@pytest.mark.parametrize("where", ["the capturing thread", "another thread"])
def test_unmapping_waits_for_the_end_of_a_capture(where, workers, daemon, linked):
    """And neither fails nor spoils what is captured."""
    one = workers.fresh()
    one.do(gpu_worker.attach, cfg=linked)
    one.do(gpu_worker.output)
    assert one.do(close_while_capturing, where=where) == {"left": [], "answer": True, "errors": []}
    assert one.do(gpu_worker.attach, cfg=linked)["source"] == "cache"
    one.do(gpu_worker.output)


# ---- the end of an interpreter -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["attachment", "model", "tensor", "cycle", "thread", "kernel", "module"])
def test_an_interpreter_ends_in_silence(how, workers, daemon, linked):
    holder = workers()
    holder.do(gpu_worker.attach, cfg=linked)
    code = f"from support.gpu_worker import exit_holding; exit_holding({how!r}, {linked!r})"
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **workers.environment, "PYTHONPATH": path}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() == holder.do(gpu_worker.output)
    assert holder.do(gpu_worker.entries)[0]["leases"] == 1, json.dumps(holder.do(gpu_worker.entries))
