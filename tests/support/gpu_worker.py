"""What workers do on a GPU: orders for ``support.worker``. Which device it is comes with the config of each order."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from support import worker
from support.worker import Here, digest
from torchwcache import WeightCache
from torchwcache.module.replace import iter_tensors

_seen: set[int] = set()
"""Where parameters lay that were attached in this process."""
_kept: list[Any] = []
"""What lives until the interpreter ends."""


# ---- models ------------------------------------------------------------------------------------------------------------------


def attach(here: Here, *, cfg: dict[str, Any], name: str = "model", **options: Any) -> dict[str, Any]:
    """As ``worker.attach``; the report says too whether addresses are those of the producer."""
    worker.attach(here, cfg=cfg, name=name, **options)
    return _remember(here, name)


def publish(here: Here, *, cfg: dict[str, Any], variant: str = "v", name: str = "published") -> dict[str, Any]:
    """As ``worker.publish``, of ``"model"``."""
    worker.publish(here, cfg=cfg, variant=variant, name=name)
    return _remember(here, name)


def _remember(here: Here, name: str) -> dict[str, Any]:
    _seen.update(parameter.data_ptr() for parameter in here.models[name].parameters() if parameter.numel())
    report = here.attachments[name].report
    return {**report.as_dict(), "same_addresses": report.same_addresses}


def make(here: Here, *, cfg: dict[str, Any], name: str = "model", seed: int = 0) -> None:
    """Build a model with random weights right on its device, without any checkpoint: what a caller publishes by hand."""
    with torch.device(cfg["device"]):
        torch.manual_seed(seed)
        module = worker.resolve(cfg["build"])(**cfg.get("build_kwargs", {}))
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.02)
    here.models[name] = module.eval().requires_grad_(False)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def inputs_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Something to feed a model with, where the model is."""
    return {name: tensor.to(device_of(model)) for name, tensor in worker.example_inputs(model).items()}


def answer_of(model: nn.Module) -> list[torch.Tensor]:
    """All that a model answers; of a language model the logits."""
    answer = model(**inputs_of(model))
    answer = getattr(answer, "logits", answer)
    return list(answer) if isinstance(answer, tuple) else [answer]


def output(here: Here, *, name: str = "model") -> str:
    """Digest of a model's answer."""
    with torch.no_grad():
        return hashlib.sha256("".join(map(digest, answer_of(here.models[name]))).encode()).hexdigest()


def compute_until(here: Here, *, stop: str, name: str = "model") -> list[str]:
    """Ask the model again and again, until the file ``stop`` exists; returns every answer that was ever given."""
    found = {output(here, name=name)}
    here.tell("computing")
    deadline_s = time.monotonic() + 60
    while not os.path.exists(stop) and time.monotonic() < deadline_s:
        found.add(output(here, name=name))
    return sorted(found)


def state(here: Here, *, name: str = "model") -> dict[str, list[Any]]:
    """Every tensor that a module holds anywhere: bits, layout, class, device, and which tensor's memory it lies in, and where."""
    owners: dict[int, tuple[str, int]] = {}
    found = {}
    for path, tensor in iter_tensors(here.models[name]).values():
        owner, start = path, tensor.data_ptr()
        if tensor.numel():
            owner, start = owners.setdefault(tensor.untyped_storage().data_ptr(), (path, start))
        facts = [digest(tensor), str(tensor.dtype), list(tensor.shape), list(tensor.stride()), type(tensor).__name__]
        found[path] = [*facts, tensor.device.type, owner, tensor.data_ptr() - start]
    return found


def addresses(here: Here, *, name: str = "model") -> dict[str, int]:
    """Where every parameter lies."""
    return {path: parameter.data_ptr() for path, parameter in here.models[name].named_parameters() if parameter.numel()}


def entries(here: Here) -> list[dict[str, Any]]:
    """What the daemon holds."""
    found = WeightCache.connect(mode="client").entries()
    return [{"key": e.key, "device": e.device, "memory": e.memory, "leases": e.leases, "nbytes": e.nbytes} for e in found]


def evict_everything(here: Here) -> list[int]:
    """How many entries were freed, and how many will be."""
    found = WeightCache.connect(mode="client").evict(everything=True)
    return [len(found.freed), len(found.pending)]


# ---- this process ------------------------------------------------------------------------------------------------------------


def protection(address: int) -> str:
    """``"r"`` or ``"rw"`` where the driver's virtual memory calls mapped something, ``""`` for all other memory, and for none."""
    from cuda.bindings import driver

    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = torch.cuda.current_device()
    error, flags = driver.cuMemGetAccess(location, address)
    return {1: "r", 3: "rw"}.get(int(flags), "") if error == driver.CUresult.CUDA_SUCCESS else ""


def protections(here: Here, *, name: str = "model") -> dict[str, str]:
    """How the memory of every parameter and buffer that has any is mapped."""
    tensors = {**dict(here.models[name].named_parameters()), **dict(here.models[name].named_buffers())}
    return {path: protection(tensor.data_ptr()) for path, tensor in tensors.items() if tensor.numel()}


def still_mapped(places: list[int], *, within_s: float = 0.0) -> list[int]:
    """Which of these addresses are mapped read-only, when the time is over at the latest."""
    deadline_s = time.monotonic() + within_s
    while (found := [address for address in places if protection(address) == "r"]) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return found


def warm_up(here: Here, *, device: str) -> None:
    """Have a context, and what the first kernels load."""
    x = torch.ones(64, 64, device=device)
    (x @ x).sum().item()
    torch.cuda.synchronize()


def free_nbytes(here: Here) -> int:
    """Free memory of the GPU, whoever uses the rest; what this process only caches counts as free."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def usage() -> dict[str, int]:
    """What this process uses that could leak."""
    gc.collect()
    torch.cuda.empty_cache()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    with open("/proc/self/maps") as file:
        maps = sum(1 for _ in file)
    return {
        "fds": len(os.listdir("/proc/self/fd")) - 1,
        "maps": maps,
        "VmSize": int(fields["VmSize"].split()[0]) * 1024,
        "VmRSS": int(fields["VmRSS"].split()[0]) * 1024,
        "free": torch.cuda.mem_get_info()[0],
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
    }


def close_all(here: Here) -> None:
    """End every attachment, and forget every model."""
    here.tidy()
    gc.collect()
    torch.cuda.empty_cache()


def let_go(here: Here) -> list[int]:
    """End a test: let go of everything, and say which addresses are mapped all the same."""
    close_all(here)
    left = still_mapped(sorted(_seen), within_s=5.0) if torch.cuda.is_initialized() else []
    _seen.clear()
    return left


# ---- interpreters that end ---------------------------------------------------------------------------------------------------


def exit_holding(how: str, cfg: dict[str, Any]) -> None:
    """Attach in an interpreter that is about to end, and leave something behind in it; prints the model's answer."""
    here = Here(lambda message: None)
    attach(here, cfg=cfg, fallback="error")
    print(output(here))
    attachment, model = here.attachments.pop("model"), here.models.pop("model")
    weight = model.block.weight
    holders: dict[str, Callable[[], object]] = {
        "attachment": lambda: _kept.append(attachment),
        "model": lambda: _kept.append(model),
        "tensor": lambda: (attachment.close(), _kept.append(weight)),
        "cycle": lambda: _tie_a_knot([attachment, model]),
        "thread": lambda: _hold_in_thread(model),
        "kernel": lambda: (torch.cuda._sleep(1_000_000_000), answer_of(model), _kept.append(model)),
        "module": lambda: sys.modules["__main__"].__dict__.update(held=model),
    }
    holders[how]()


def _tie_a_knot(things: list[Any]) -> None:
    things.append(things)


def _hold_in_thread(model: nn.Module) -> None:
    threading.Thread(target=lambda held: threading.Event().wait(), args=(model,), daemon=True).start()
