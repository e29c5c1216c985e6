"""What the GPU benchmarks run in processes of their own: ``python benchmarks/_cuda_worker.py FUNCTION JSON``.

Each function is a generator: what it yields is printed as a line of JSON, and it goes on when a line comes from stdin. First it
gets ready (imports, CUDA context), so that the clock measures the weights alone; at the end of stdin the process ends at once.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import pickle
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Steps = Iterator[dict[str, Any]]
_LENGTH = struct.Struct("!I")
_FREE_TIMEOUT_S = 30.0


def get_ready(device: str) -> dict[str, Any]:
    """Import everything, make the CUDA context, and say on what."""
    import torch

    import torchwcache_nn  # noqa: F401

    if device == "cpu":
        return {"ready": True}
    from torchwcache.memory.select import memory_for

    assert memory_for(device).device_id  # imports the driver's binding, and makes the context
    torch.empty(1, device=device)
    torch.cuda.synchronize()
    properties = torch.cuda.get_device_properties(device)
    gpu = {
        "name": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }
    return {"ready": True, "gpu": gpu}


def machine(device: str) -> Steps:
    """Say on what."""
    yield get_ready(device)


def config(folder: str, kwargs: dict[str, int], device: str) -> Any:
    import _cuda_models

    from torchwcache import ModelConfig

    return ModelConfig(Path(folder) / "model.safetensors", build=_cuda_models.Stack, build_kwargs=kwargs, device=device)


def make_checkpoint(folder: str) -> Steps:
    """A file that stands for the checkpoint: what is published was never in it."""
    import torch
    from safetensors.torch import save_file

    save_file({"nothing": torch.zeros(1)}, Path(folder) / "model.safetensors")
    yield {}


def wait_for_memory(device: str, nbytes: int) -> None:
    """What processes that just ended had is given back by the driver a little later."""
    import torch

    if device == "cpu":
        return
    deadline = time.monotonic() + _FREE_TIMEOUT_S
    while (free := torch.cuda.mem_get_info(device)[0]) < nbytes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{nbytes / 2**30:.1f} GiB are needed on {device}, {free / 2**30:.1f} GiB are free")
        time.sleep(0.02)


# ---- torchwcache ------------------------------------------------------------------------------------------------------------


def publish(folder: str, kwargs: dict[str, int], device: str, variant: str, random: bool = False) -> Steps:
    """Make a stack on the device, publish it, and stay: the first engine of the machine."""
    import _cuda_models

    from torchwcache import WeightCache

    yield get_ready(device)
    wait_for_memory(device, _cuda_models.stack_nbytes(kwargs))
    model = _cuda_models.make_live(kwargs, device, random=random)
    attachment = WeightCache.connect(mode="client").publish(config(folder, kwargs, device), model, variant=variant)
    yield attachment.report.as_dict()


def attach(folder: str, kwargs: dict[str, int], device: str, variant: str) -> Steps:
    """Attach what another process published."""
    import _cuda_models

    from torchwcache import WeightCache

    ready = get_ready(device)
    cfg = config(folder, kwargs, device)
    yield ready
    started = time.perf_counter()
    attachment = WeightCache.attach(cfg, mode="client", fallback="error", variant=variant)
    ready_s = time.perf_counter() - started
    report = attachment.report
    assert report.source == "cache", report
    yield {
        "ready_s": ready_s,
        "seconds": report.seconds,
        "tensors": report.tensors,
        "mapped_nbytes": report.mapped_nbytes,
        "copied_nbytes": report.copied_nbytes,
        "same_addresses": report.same_addresses,
        "checked": _cuda_models.check(attachment.model.weights(), kwargs),
    }


# ---- torch CUDA IPC, as SGLang 0.5.23 does it (srt/weight_cache: transport.py, protocol.py, ipc_loader.py) ------------------


def ipc_serve(socket_path: str, kwargs: dict[str, int], device: str) -> Steps:
    """Hold a stack and hand out one handle per tensor: exported once, pickled and in base64 each, all in one pickled message."""
    from multiprocessing.reduction import ForkingPickler

    import _cuda_models
    import torch.multiprocessing.reductions  # noqa: F401

    yield get_ready(device)
    wait_for_memory(device, _cuda_models.stack_nbytes(kwargs))
    model = _cuda_models.make_live(kwargs, device)
    started = time.perf_counter()
    entries = {}
    for name, tensor in model.state_dict().items():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(tensor.data)
        entries[name] = {
            "handle": base64.b64encode(buffer.getvalue()).decode(),
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).replace("torch.", ""),
            "is_param": True,
        }

    def answer(conn: socket.socket) -> None:
        _receive_message(conn)
        data = pickle.dumps({"status": "ok", "entries": entries}, protocol=pickle.HIGHEST_PROTOCOL)
        conn.sendall(_LENGTH.pack(len(data)) + data)

    listen(socket_path, answer)
    yield {"export_s": time.perf_counter() - started}


def ipc_attach(socket_path: str, kwargs: dict[str, int], device: str) -> Steps:
    """Get the handles, open each, and put each tensor into a module that was built on meta before."""
    import _cuda_models
    import torch

    ready = get_ready(device)
    with torch.device("meta"):
        model = _cuda_models.Stack(**kwargs).eval()
    existing = dict(model.named_parameters(remove_duplicate=False))
    yield ready
    kept = []
    opened_s = assigned_s = 0.0
    started = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as conn:
        conn.connect(socket_path)
        data = pickle.dumps({"type": "fetch_state"}, protocol=pickle.HIGHEST_PROTOCOL)
        conn.sendall(_LENGTH.pack(len(data)) + data)
        entries = _receive_message(conn)["entries"]
    received = time.perf_counter()
    for name, entry in entries.items():  # as they do, without stopping the garbage collector
        before = time.perf_counter()
        tensor = pickle.loads(base64.b64decode(entry["handle"], validate=True))
        between = time.perf_counter()
        assert tensor.shape == existing[name].shape
        assert tensor.dtype == existing[name].dtype
        _set_module_tensor(model, name, tensor)
        kept.append(tensor)
        opened_s += between - before
        assigned_s += time.perf_counter() - between
    left = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    done = time.perf_counter()
    assert not left, left[:10]
    yield {
        "placed_s": done - started,
        "receive_s": received - started,
        "open_s": opened_s,
        "assign_s": done - received - opened_s,
        "checked": _cuda_models.check(model.weights(), kwargs),
    }


def _set_module_tensor(model: Any, name: str, tensor: Any) -> None:
    from torch import nn

    *parents, leaf = name.split(".")
    module = model
    for parent in parents:
        module = getattr(module, parent)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))


def _receive_message(conn: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive(conn, _LENGTH.size))
    return pickle.loads(_receive(conn, length))


def _receive(conn: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        chunk = conn.recv(nbytes - len(data))
        if not chunk:
            raise ConnectionError("the other side is gone")
        data.extend(chunk)
    return bytes(data)


def listen(path: str, answer: Callable[[socket.socket], None]) -> None:
    """Answer whoever connects, in a thread of its own, until the process ends."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(16)

    def serve() -> None:
        while True:
            conn, _ = server.accept()
            with conn, contextlib.suppress(OSError):
                answer(conn)

    threading.Thread(target=serve, daemon=True).start()


# ---- the floor: one mapping, bare views -------------------------------------------------------------------------------------


def floor_serve(socket_path: str, kwargs: dict[str, int], device: str) -> Steps:
    """Hold one segment with all the tensors, and hand out its descriptor."""
    import _cuda_models
    import torch

    from torchwcache.memory.select import memory_for

    yield get_ready(device)
    step, nbytes = _floor_layout(kwargs)
    wait_for_memory(device, nbytes)
    memory = memory_for(device)
    segment = memory.allocate(nbytes)
    whole = segment.tensor(0, nbytes).view(torch.int32)
    for number in range(kwargs["count"]):
        whole[number * step // 4 : (number + 1) * step // 4].fill_(_cuda_models.code_of(number))
    del whole
    fd = segment.seal()
    said = json.dumps({"nbytes": segment.nbytes}).encode()

    def answer(conn: socket.socket) -> None:
        socket.send_fds(conn, [said], [fd])

    listen(socket_path, answer)
    yield {"nbytes": segment.nbytes}


def floor_attach(socket_path: str, kwargs: dict[str, int], device: str) -> Steps:
    """Map that one segment, and make the views, which nothing holds but a list."""
    import _cuda_models
    import torch

    from torchwcache.memory.select import memory_for

    ready = get_ready(device)
    memory = memory_for(device)
    step, _ = _floor_layout(kwargs)
    shape, stride = (kwargs["rows"], kwargs["width"]), (kwargs["width"], 1)
    yield ready
    started = time.perf_counter()
    with socket.socket(socket.AF_UNIX) as conn:
        conn.connect(socket_path)
        said, fds, _, _ = socket.recv_fds(conn, 4096, 1)
    received = time.perf_counter()
    nbytes = json.loads(said)["nbytes"]
    (segment,) = memory.map_all(fds, [nbytes])
    os.close(fds[0])
    mapped = time.perf_counter()
    flat = {"dtype": torch.bfloat16, "device": memory.device, "size": (nbytes // 2,), "stride": (1,), "storage_offset": 0}
    (whole,) = segment.views([0], [nbytes], [0], [flat])
    views = [whole.as_strided(shape, stride, number * step // 2) for number in range(kwargs["count"])]
    segment.settle()
    done = time.perf_counter()
    yield {
        "placed_s": done - started,
        "receive_s": received - started,
        "map_s": mapped - received,
        "views_s": done - mapped,
        "checked": _cuda_models.check(views, kwargs),
    }


def _floor_layout(kwargs: dict[str, int]) -> tuple[int, int]:
    """Bytes from one tensor to the next, and of all."""
    step = -(-kwargs["rows"] * kwargs["width"] * 2 // 512) * 512
    return step, step * kwargs["count"]


# ---- computing with attached weights ----------------------------------------------------------------------------------------


def compute(folder: str, kwargs: dict[str, int], device: str, variant: str, rounds: int) -> Steps:
    """Read, multiply, and run matrix-vector products with attached weights and with ordinary ones, by turns.

    A second ordinary copy is the control: how far it is from the first is what memory's place alone makes.
    """
    import torch

    from torchwcache import WeightCache

    ready = get_ready(device)
    yield ready
    attachment = WeightCache.attach(config(folder, kwargs, device), mode="client", fallback="error", variant=variant)
    attached = attachment.model.weights()
    sets = {"attached": attached, "ordinary": [w.clone() for w in attached], "control": [w.clone() for w in attached]}
    width = kwargs["width"]
    batch = torch.empty(kwargs["rows"], width, dtype=torch.bfloat16, device=device).normal_()
    token = batch[:1].clone()
    products = attached[:: max(1, len(attached) // 4)][:4]
    nbytes = sum(weight.nbytes for weight in attached)
    works: dict[str, tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], float, str]] = {
        "read": (lambda ws: [w.view(torch.float32).sum() for w in ws], nbytes / 1e9, "GB/s"),
        "decode": (lambda ws: [torch.nn.functional.linear(token, w) for w in ws], nbytes / 1e9, "GB/s"),
        "matmul": (
            lambda ws: [torch.nn.functional.linear(batch, w) for w in ws[:: max(1, len(ws) // 4)][:4]],
            2 * batch.numel() * sum(w.shape[0] for w in products) / 1e12,
            "TFLOP/s",
        ),
    }
    found = {}
    with torch.inference_mode():
        for name, (work, amount, unit) in works.items():
            outputs = {which: work(weights) for which, weights in sets.items()}  # warms up, too
            equal = all(torch.equal(a, b) for a, b in zip(outputs["attached"], outputs["ordinary"], strict=True))
            del outputs
            seconds: dict[str, list[float]] = {which: [] for which in sets}
            for number in range(rounds):
                order = list(sets)
                for which in order[number % 3 :] + order[: number % 3]:
                    seconds[which].append(_timed(lambda work=work, which=which: work(sets[which]), device))
            found[name] = {"seconds": seconds, "amount": amount, "unit": unit, "equal": equal}
    yield {"works": found, "gib": nbytes / 2**30}


def _timed(work: Callable[[], Any], device: str) -> float:
    import torch

    if device == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    kept = work()
    end.record()
    torch.cuda.synchronize()
    del kept
    return start.elapsed_time(end) / 1e3


# ---- publishing -------------------------------------------------------------------------------------------------------------


def publish_rounds(folder: str, kwargs: dict[str, int], device: str, timed: int) -> Steps:
    """Make and publish a stack several times over: first to warm up, then for the time, then for the memory."""
    import _cuda_models
    from _cuda_publish import Watch

    from torchwcache import WeightCache

    yield get_ready(device)
    cache = WeightCache.connect(mode="client")
    nbytes = _cuda_models.stack_nbytes(kwargs)
    small = {**kwargs, "count": min(kwargs["count"], 8), "rows": min(kwargs["rows"], 64)}
    watch = Watch(device)
    for number, what in enumerate(["warm", *["time"] * timed, "memory"]):
        given = small if what == "warm" else kwargs
        wait_for_memory(device, nbytes)
        model = _cuda_models.make_live(given, device)
        with watch.on(memory=what == "memory"):
            attachment = cache.publish(config(folder, given, device), model, variant=f"round-{number}")
        checked = _cuda_models.check(model.weights(), given)
        report = attachment.report
        attachment.close()
        del model, attachment
        watch.release()
        cache.evict(everything=True)
        if what != "warm":
            yield {"what": what, "nbytes": nbytes, "seconds": report.seconds, "checked": checked, **watch.found()}


def publish_floor(kwargs: dict[str, int], device: str, timed: int) -> Steps:
    """What the driver alone takes for a publish: allocate a segment, copy tensors into it, free their originals, and the next one.

    No module, no manifest, no daemon; and what Python needs to get ready for a segment is not counted.
    """
    import _cuda_models
    import torch

    from torchwcache.memory.select import memory_for

    yield get_ready(device)
    memory, count = memory_for(device), kwargs["count"]
    each = _cuda_models.stack_nbytes(kwargs) // count
    aligned = -(-each // memory.alignment) * memory.alignment
    per_segment = max(1, memory.segment_nbytes(aligned * count) // aligned)
    for number in range(timed + 1):
        warm = number == 0
        rows = min(kwargs["rows"], 64) if warm else kwargs["rows"]
        given = {**kwargs, "rows": rows}
        wait_for_memory(device, _cuda_models.stack_nbytes(given))
        nbytes = _cuda_models.stack_nbytes(given) // count
        originals = [weight.view(-1).view(torch.uint8) for weight in _cuda_models.make_live(given, device).weights()]
        seconds = {"allocate": 0.0, "copy": 0.0, "free": 0.0}
        segments, copies = [], []
        memory.synchronize()
        while originals:
            now, originals = originals[:per_segment], originals[per_segment:]
            started = time.perf_counter()
            segments.append(memory.allocate(len(now) * aligned, zeroed=False))
            seconds["allocate"] += time.perf_counter() - started
            targets = [segments[-1].tensor(i * aligned, nbytes) for i in range(len(now))]
            started = time.perf_counter()
            for target, original in zip(targets, now, strict=True):
                target.copy_(original)
            memory.synchronize()
            copied = time.perf_counter()
            now.clear()
            del original
            memory.release_freed()
            seconds["copy"] += copied - started
            seconds["free"] += time.perf_counter() - copied
            copies += targets
        shape = (given["rows"], given["width"])
        checked = _cuda_models.check([copy.view(torch.bfloat16).view(shape) for copy in copies], given)
        said = {"seconds": seconds, "checked": checked, "segments": len(segments)}
        for segment in segments:
            segment.close()
        del segments, copies, targets, target, segment
        memory.synchronize()
        if not warm:
            yield said


def copy_beside_free(device: str, nbytes: int, count: int) -> Steps:
    """Can a device copy while memory is freed? A thread copies all the time; ``count`` times ``nbytes`` are freed meanwhile."""
    import torch
    from cuda.bindings import runtime

    chunk, behind = 256 << 20, 4
    yield get_ready(device)
    source, target = (torch.empty(4 << 30, dtype=torch.uint8, device=device).split(chunk) for _ in range(2))
    copied, stop = 0, threading.Event()

    def make() -> list[int]:
        found = [runtime.cudaMalloc(nbytes) for _ in range(count)]
        assert not any(int(error) for error, _ in found), found
        return [address for _, address in found]

    def free(addresses: list[int]) -> float:
        started = time.perf_counter()
        for address in addresses:  # the binding lets other threads run meanwhile
            (error,) = runtime.cudaFree(address)
            assert not int(error), error
        return time.perf_counter() - started

    def copy() -> None:
        nonlocal copied
        events = []
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                number = copied % len(source)
                target[number].copy_(source[number])
                events.append(torch.cuda.current_stream().record_event())
                if len(events) > behind:
                    events.pop(0).synchronize()
                    copied += 1

    wait_for_memory(device, nbytes * count)
    alone_s = free(make())
    addresses = make()
    torch.cuda.synchronize()
    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        while copied < 2 * behind:
            time.sleep(0.001)
        before, started = copied, time.perf_counter()
        time.sleep(max(alone_s, 0.02))
        alone_gb_s = (copied - before) * chunk / 1e9 / (time.perf_counter() - started)
        before = copied
        beside_s = free(addresses)
        beside_gb_s = (copied - before) * chunk / 1e9 / beside_s
    finally:
        stop.set()
        thread.join()
    yield {"alone_s": alone_s, "beside_s": beside_s, "alone_gb_s": alone_gb_s, "beside_gb_s": beside_gb_s}


# ---- waiting for a quiet moment ---------------------------------------------------------------------------------------------

QUIET_FILE = "TORCHWCACHE_BENCH_QUIET"
"""Names the file that the workers of a run share: the least time of :func:`python_ms` in it, and how long they may still wait."""
MEASURED = frozenset({"attach", "floor_attach", "ipc_attach", "publish_rounds", "publish_floor"})
_DISTURBED = 1.2
_QUIET_TIMEOUT_S, _LOOK_AGAIN_S = 10.0, 0.25


def python_ms() -> float:
    """Milliseconds of a fixed piece of Python: how fast this machine runs any of it just now."""
    found = []
    for _ in range(5):
        started = time.perf_counter()
        made: dict[int, tuple[int, str]] = {}
        for number in range(4000):
            made[number % 1000] = (number, str(number))
        found.append((time.perf_counter() - started) * 1e3)
    return min(found)


def wait_for_quiet(path: Path) -> dict[str, float]:
    """Wait until the machine is about as fast as it was at its fastest in this run, but not for long.

    On a machine that is shared, the same Python may take twice as long for minutes. How fast it was when the measurement began goes
    into the result.
    """
    shared = json.loads(path.read_text()) if path.exists() else {"least_ms": float("inf"), "left_s": 60.0}
    started = time.monotonic()
    until = started + min(_QUIET_TIMEOUT_S, shared["left_s"])
    while (now_ms := python_ms()) > _DISTURBED * shared["least_ms"] and time.monotonic() < until:
        time.sleep(_LOOK_AGAIN_S)
    waited_s = time.monotonic() - started
    path.write_text(json.dumps({"least_ms": min(now_ms, shared["least_ms"]), "left_s": max(0.0, shared["left_s"] - waited_s)}))
    return {"python_ms": now_ms, "waited_s": waited_s}


# ---- the loop ---------------------------------------------------------------------------------------------------------------


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not get between
    name, quiet = sys.argv[1], os.environ.get(QUIET_FILE)
    machine: dict[str, float] = {}
    for said in globals()[name](**json.loads(sys.argv[2])):
        if machine:
            machine["python_after_ms"] = python_ms()
        out.write(json.dumps({**said, **machine}) + "\n")
        out.flush()
        if not sys.stdin.readline():
            break
        if quiet and name in MEASURED:
            machine = wait_for_quiet(Path(quiet))
    os._exit(0)  # taking 92,000 tensors apart takes seconds that nobody asked for


if __name__ == "__main__":
    main()
