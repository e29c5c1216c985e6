"""Room for a publish: what is evicted may come back a little later, and what is not evicted is not waited for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from torchwcache import production
from torchwcache.errors import SegmentMemoryError
from torchwcache.wire.messages import Evicted

MIB = 1 << 20


class Device:
    """A device whose driver gives memory back at the third look after an eviction."""

    device_id = "a device"

    def __init__(self, *, comes_back: bool) -> None:
        self.comes_back, self.looks = comes_back, 0

    def available_nbytes(self) -> int:
        self.looks += 1
        return 8 * MIB if self.comes_back and self.looks > 4 else MIB


class Daemon:
    def __init__(self, freed: tuple[str, ...]) -> None:
        self.freed, self.asked = freed, 0

    def make_room(self, device: str, *, nbytes: int) -> Evicted:
        self.asked = nbytes
        return Evicted(freed=self.freed, pending=(), nbytes=nbytes if self.freed else 0)


@pytest.fixture
def make_room(monkeypatch: pytest.MonkeyPatch) -> Callable[[Daemon, Device, int], None]:
    monkeypatch.setattr(production, "_FREED_WITHIN_S", 2.0)
    return production.make_room  # type: ignore[return-value]


def test_memory_that_comes_back_later_is_waited_for(make_room: Callable[[Daemon, Device, int], None]) -> None:
    daemon, device = Daemon(("0" * 32,)), Device(comes_back=True)
    make_room(daemon, device, 4 * MIB)
    assert daemon.asked == 3 * MIB
    assert device.looks > 4


def test_where_nothing_was_evicted_nothing_is_waited_for(make_room: Callable[[Daemon, Device, int], None]) -> None:
    device = Device(comes_back=True)
    with pytest.raises(SegmentMemoryError, match="nothing was published"):
        make_room(Daemon(()), device, 4 * MIB)
    assert device.looks == 2


def test_the_wait_has_a_bound(make_room: Callable[[Daemon, Device, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(production, "_FREED_WITHIN_S", 0.05)
    with pytest.raises(SegmentMemoryError, match="are available on a device"):
        make_room(Daemon(("0" * 32,)), Device(comes_back=False), 4 * MIB)


def traced() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)))


def with_a_sparse_buffer() -> nn.Module:
    module = nn.Linear(2, 2)
    module.register_buffer("sparse", torch.eye(2).to_sparse())
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    return module


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("build", "nbytes"), [(tied, 24), (traced, 48), (with_a_sparse_buffer, 24), (lambda: nn.Sequential(nn.LazyLinear(2)), 0)]
)
def test_every_module_has_a_size(build: Callable[[], nn.Module], nbytes: int) -> None:
    """Whether it can be published is said later, and with the reason."""
    assert production.module_nbytes(build()) == nbytes
