"""What modules refer to but a process owns: process groups, streams."""

from __future__ import annotations

import pytest
import torch
from support.roundtrip import Publication, capture_loaded, roundtrip
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.errors import CaptureError, RebindError


class Group:
    """As engines have it: made once in a process, with names of its own and a buffer."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.buffer = torch.zeros(3)


class Subgroup(Group):
    pass


GROUPS = {"now": Group(1)}
RULES = CaptureRules(process={f"{__name__}:Group": "a process group"})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.group = GROUPS["now"]
        self.move = lambda: self.group.buffer
        self.plan = [(GROUPS["now"], 1)]


@pytest.fixture(params=[Group, Subgroup])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Group]:
    monkeypatch.setitem(GROUPS, "now", request.param(1))
    return request.param


def test_an_object_of_the_process_is_each_processs_own(kind: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    publication = Publication(capture_loaded(Net(), Net, RULES))
    theirs = kind(2)
    monkeypatch.setitem(GROUPS, "now", theirs)
    attached, _ = publication.attach(Net)
    assert attached.group is theirs
    assert attached.plan[0][0] is theirs
    assert attached.move() is theirs.buffer
    assert theirs.port == 2
    assert len(publication.manifest().tensors) == 2, "its buffer belongs to no model"


def test_without_the_rule_it_counts(kind: type[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    publication = Publication(capture_loaded(Net(), Net))
    monkeypatch.setitem(GROUPS, "now", kind(2))
    with pytest.raises(RebindError, match="port"):
        publication.attach(Net)


def test_another_one_than_the_builds_is_not_taken_for_the_same(kind: type[Group]) -> None:
    loaded = Net()
    loaded.group = kind(7)
    loaded.group.extra = object()
    with pytest.raises(CaptureError, match=r"group\.extra"):
        capture_loaded(loaded, Net, RULES)


class Overlapped(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.stream = torch.Stream(device=device)


def test_a_stream_of_the_build_is_as_good_as_the_loads() -> None:
    attached = roundtrip(Overlapped(), Overlapped)
    assert isinstance(attached.stream, torch.Stream)
