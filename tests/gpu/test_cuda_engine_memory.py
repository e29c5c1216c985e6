"""What a load takes is what torch's allocator says, and an attach is told the same without having allocated anything."""

from __future__ import annotations

import pytest
import torch
from support import gpu_models, gpu_worker, plain_models

from torchwcache import engine_memory

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROWS = 11 * 1024 + 512
"""A matrix of 11.5 MiB, for which the allocator takes 12, and hands out 12: half a MiB is too little to be a block of its own."""


def load(here, *, cfg):
    device = torch.device(cfg["device"])
    before = engine_memory.allocator_nbytes(str(device))
    with device:
        module = gpu_models.Odd(rows=ROWS, layers=3).eval().requires_grad_(False)
    garbage = [torch.empty(64 * MIB, device=device)]
    garbage.append(garbage)
    del garbage
    engine_memory.note_growth(module, before, str(device))
    here.models["model"] = module
    return {name: engine_memory.growth_of(module, name) for name in ("allocated", "reserved")}


def growth(here, *, name="model"):
    module = here.models[name]
    return {name: engine_memory.growth_of(module, name) for name in ("allocated", "reserved")}


def test_the_allocators_blocks_are_counted_not_the_bytes(workers, daemon, tmp_path, device):
    path = plain_models.save(gpu_models.Odd, tmp_path / "odd.safetensors", rows=8, layers=3)
    cfg = {"checkpoint": path, "build": "support.gpu_models:Odd", "build_kwargs": {"rows": ROWS, "layers": 3}, "device": device}
    producer, client = workers(), workers()
    taken = producer.do(load, cfg=cfg)
    assert taken == {"allocated": 3 * 12 * MIB, "reserved": 3 * 12 * MIB}
    assert producer.do(gpu_worker.publish, cfg=cfg)["published"]
    report = client.do(gpu_worker.attach, cfg=cfg, variant="v")
    assert report["mapped_nbytes"] == 3 * ROWS * 1024
    assert client.do(growth) == taken
