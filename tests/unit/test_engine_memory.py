"""What a load takes by the allocator's count; on a GPU: ``tests/gpu/test_cuda_engine_memory.py``."""

from __future__ import annotations

import pytest
import torch
from support.roundtrip import roundtrip
from torch import nn

from torchwcache import engine_memory


def test_on_the_host_nothing_is_counted() -> None:
    before = engine_memory.allocator_nbytes("cpu")
    module = nn.Linear(2, 2)
    engine_memory.note_growth(module, before, "cpu")
    assert engine_memory.growth_of(module, "allocated") is None


def test_the_count_travels_with_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([{"allocated": 100, "reserved": 200}, {"allocated": 150, "reserved": 2200}])
    monkeypatch.setattr(engine_memory, "allocator_nbytes", lambda device: next(counts))
    before = engine_memory.allocator_nbytes("cuda")
    module = nn.Linear(2, 2).eval().requires_grad_(False)
    engine_memory.note_growth(module, before, "cuda")
    attached = roundtrip(module, lambda: nn.Linear(2, 2))
    assert torch.equal(attached.weight, module.weight)
    assert engine_memory.growth_of(attached, "allocated") == 50
    assert engine_memory.growth_of(attached, "reserved") == 2000
