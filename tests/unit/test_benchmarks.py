"""What the documentation says of speed is what a script measured, and a missed target stays in it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
RESULT = {
    "benchmark": "attach_host",
    "date": "2026-01-01",
    "complete": True,
    "machine": {"cpu": "a", "cores": 2, "memory_gib": 1.0, "kernel": "6", "load_average_at_start": 0.1, "load_average_at_end": 0.2},
    "versions": {"torch": "2"},
    "rows": [{"kind": "small", "what": "import torchwcache", "ms": 12.345}],
    "targets": [
        {"name": "fast", "target": 3.0, "measured": 2.0, "unit": "ms", "met": True},
        {"name": "slow", "target": 3.0, "measured": 4.0, "unit": "ms", "met": False},
    ],
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("attach_host")


@pytest.fixture
def report(benchmark: Any) -> Any:
    return benchmark._report


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_what_every_result_has(path: Path) -> None:
    result = json.loads(path.read_text())
    assert {"machine", "versions", "rows", "targets"} <= result.keys()
    assert result["complete"], "a --quick run is no result"
    for target in result["targets"]:
        assert target.keys() == {"name", "target", "measured", "unit", "met"}
        assert target["met"] == (target["measured"] <= target["target"])


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_is_what_the_script_writes(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    script = importlib.import_module(path.stem)
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    script.write_docs(json.loads(path.read_text()), page)
    assert page.read_text() == (ROOT / "docs" / "benchmarks.md").read_text(), f"run benchmarks/{path.stem}.py --docs-only"


def test_a_missed_target_is_told(benchmark: Any) -> None:
    text = benchmark.section(RESULT)
    assert "Targets missed: slow." in text
    assert "**no**" in text


def test_a_page_keeps_what_else_is_in_it(benchmark: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    benchmark.write_docs(RESULT, page)
    once = page.read_text()
    assert once.startswith("# Benchmarks")
    page.write_text(f"{once}\nAnother benchmark.\n")
    benchmark.write_docs(RESULT, page)
    assert page.read_text() == f"{once}\nAnother benchmark.\n"


def test_a_target_is_met_up_to_its_value(report: Any) -> None:
    assert [report.Target(name="", target=3.0, measured=x, unit="").met for x in (2.9, 3.0, 3.1)] == [True, True, False]
