"""What a load takes by the allocator's count; on a GPU: ``tests/gpu/test_cuda_engine_memory.py``."""

from __future__ import annotations

from collections.abc import Callable

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


GIB = 1 << 30


def test_so_much_is_wanted_that_the_engine_gets_its_share_and_nothing_is_evicted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 80 * GIB))
    assert engine_memory.wanted_nbytes("cuda:0", 0.9) == 72 * GIB
    assert engine_memory.wanted_nbytes("cuda:0", 0.9, mapped=60 * GIB) == 12 * GIB
    assert engine_memory.wanted_nbytes("cuda:0", 0.9, needed=76 * GIB) == 76 * GIB
    assert engine_memory.wanted_nbytes("cuda:0", 0.5, needed=36 * GIB) == 40 * GIB


def test_what_is_evicted_is_waited_for_until_the_driver_has_given_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would come in the middle of an engine's count. An entry is evicted as a whole, and may be more than was wanted."""
    there = {"free": 30, "coming": 0}

    def look(device: str) -> tuple[int, int]:
        if there["coming"]:
            there["coming"], there["free"] = there["coming"] - 1, there["free"] + 1
        return there["free"] * GIB, 80 * GIB

    def evict(nbytes: int, count: Callable[[], int]) -> int:
        there["coming"] = 45 if count() < nbytes else 0
        return there["coming"] * GIB

    monkeypatch.setattr(torch.cuda, "mem_get_info", look)
    assert engine_memory.make_free(evict, "cuda:0", 20 * GIB) == 0
    assert engine_memory.make_free(evict, "cuda:0", 40 * GIB) == 45 * GIB
    assert there == {"free": 75, "coming": 0}


def test_what_is_never_given_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_memory, "_GIVEN_BACK_WITHIN_S", 0.05)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    assert engine_memory.make_free(lambda nbytes, count: 45 * GIB, "cuda:0", 60 * GIB) == 0
