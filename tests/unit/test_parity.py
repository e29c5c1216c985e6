"""The comparison must be able to fail: each thing that it compares is corrupted once, and must be named."""

from __future__ import annotations

import pytest
import torch
from support.corruptions import CORRUPTIONS, Net

from torchwcache.adapter import CaptureRules
from torchwcache.module.parity import compare_modules


def test_equal_modules_are_equal() -> None:
    report = compare_modules(Net(), Net(), requires_grad=True)
    assert report.equal, [str(d) for d in report.differences]
    assert report.tensors > 8
    assert report.nbytes > 0


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_named(name: str) -> None:
    corrupt, expected = CORRUPTIONS[name]
    found = Net()
    with torch.no_grad():
        corrupt(found)
    report = compare_modules(Net(), found)
    assert any(expected in str(difference) for difference in report.differences), [str(d) for d in report.differences]


def test_requires_grad_is_compared_when_asked() -> None:
    found = Net()
    found.a.bias.requires_grad_(False)
    assert compare_modules(Net(), found).equal
    assert not compare_modules(Net(), found, requires_grad=True).equal


def test_nan_equals_itself_and_rules_leave_out() -> None:
    one, two = Net(), Net()
    for module in (one, two):
        module.seen.fill_(float("nan"))
    two.mode = "elsewhere"
    assert compare_modules(one, two, rules=CaptureRules(ignore={"mode": "differs by process"})).equal


def test_the_report_goes_into_json() -> None:
    found = Net()
    found.mode = "flash"
    report = compare_modules(Net(), found).as_dict()
    assert report["equal"] is False
    assert report["differences"][0]["path"] == "mode"
