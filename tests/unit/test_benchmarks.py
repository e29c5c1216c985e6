"""What the documentation says of speed is what a script measured, and a missed target stays in it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

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
def benchmark() -> Any:
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
        assert target.keys() - {"at_least"} == {"name", "target", "measured", "unit", "met"}
        enough = target["measured"] >= target["target"] if target.get("at_least") else target["measured"] <= target["target"]
        assert target["met"] == enough


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_page_is_what_the_script_writes(path: Path, tmp_path: Path) -> None:
    result = json.loads(path.read_text())
    script = importlib.import_module(result["benchmark"])
    page = tmp_path / "benchmarks.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text())
    script.write_docs(result, page)
    assert page.read_text() == (ROOT / "docs" / "benchmarks.md").read_text(), f"run benchmarks/{script.__name__}.py --docs-only"


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


def test_a_target_may_be_one_to_be_reached(report: Any) -> None:
    targets = [report.Target(name="", target=3.0, measured=x, unit="", at_least=True) for x in (2.9, 3.0, 3.1)]
    assert [target.met for target in targets] == [False, True, True]
    assert "at_least" not in report.Target(name="", target=3.0, measured=1.0, unit="").as_dict()
    table = report.targets_table([targets[0].as_dict(), report.Target(name="", target=1.3, measured=1.0, unit="").as_dict()])
    assert "at least 3" in table
    assert "at most 1.3" in table


# ---- on a GPU: what can be said of them without one --------------------------------------------------------------------------

GPU_SCRIPTS = ["attach_cuda", "publish_cuda", "restart", "engine_restart"]
GPU = {"name": "NVIDIA H200", "memory_gib": 139.8, "driver": "580.1", "cuda": "13.0", "persistence_mode": "Enabled"}
SECONDS = {"interpreter": 0.02, "import_torch": 1.5, "weights": 0.004, "first_forward": 0.3}
WATERFALL = [{"kind": "waterfall", "name": f"{way} <b>", "seconds": SECONDS} for way in ("from disk", "from the cache")]


@pytest.mark.parametrize("name", GPU_SCRIPTS)
def test_a_result_from_a_gpu_names_it(name: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Benchmarks\n")
    options = {"engine": "vllm", "parts": ["fp8"]} if name == "engine_restart" else {}
    result = {**RESULT, "benchmark": name, "options": options, "machine": {**RESULT["machine"], "gpu": GPU}, "rows": WATERFALL}
    importlib.import_module(name).write_docs(result, page)
    once = page.read_text()
    assert "GPU: NVIDIA H200, 140 GiB, driver 580.1, CUDA 13.0, persistence mode enabled." in once
    assert f"python benchmarks/{name}.py" in once
    importlib.import_module(name).write_docs(result, page)
    assert page.read_text() == once


def test_a_run_of_some_parts_stands_beside_the_one_of_all(tmp_path: Path) -> None:
    script = importlib.import_module("engine_restart")
    page = tmp_path / "page.md"
    page.write_text("")
    for parts in (["bf16", "tp2", "fp8", "large"], ["fp8"]):
        options = {"engine": "sglang", "parts": parts}
        script.write_docs({**RESULT, "benchmark": "engine_restart", "options": options, "rows": []}, page)
    said = page.read_text()
    assert re.findall("^## (.*)$", said, re.MULTILINE) == ["Starts of SGLang", "Starts of SGLang: fp8"]
    assert "engine_restart.py sglang --parts fp8`" in said


@pytest.mark.parametrize("name", GPU_SCRIPTS)
def test_every_column_belongs_to_a_table_of_the_script(name: str) -> None:
    tables = importlib.import_module(name).TABLES
    assert len({table.kind for table in tables}) == len(tables)
    assert all(len(set(table.columns.values())) == len(table.columns) for table in tables)


def test_the_waterfall_is_to_scale_and_well_formed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("")
    importlib.import_module("restart").write_docs({**RESULT, "benchmark": "restart", "rows": WATERFALL}, page)
    picture = (tmp_path / "assets" / "restart.svg").read_text()
    assert "assets/restart.svg" in page.read_text()
    svg = "{http://www.w3.org/2000/svg}"
    bars = [bar for bar in ElementTree.fromstring(picture).iter(f"{svg}rect") if bar.get("class")]
    assert [bar.get("class") for bar in bars] == ["b", "b", "w", "b"] * 2
    starts, widths = ([float(bar.get(what, "")) for bar in bars[:4]] for what in ("x", "width"))
    scale = widths[1] / SECONDS["import_torch"]
    assert widths[3] / scale == pytest.approx(SECONDS["first_forward"], rel=0.01)
    assert starts[1] + widths[1] == pytest.approx(starts[2], abs=0.2)


@pytest.mark.skipif(not (ROOT / "benchmarks/results/restart.json").exists(), reason="no result of this benchmark yet")
def test_the_picture_is_what_the_script_draws() -> None:
    result = json.loads((ROOT / "benchmarks/results/restart.json").read_text())
    drawn = importlib.import_module("restart").picture(result)
    assert (ROOT / "docs/assets/restart.svg").read_text() == drawn, "run benchmarks/restart.py --docs-only"


def test_a_client_finds_a_wrong_tensor() -> None:
    models, cases = importlib.import_module("_cuda_models"), importlib.import_module("attach_cuda")
    kwargs = cases.Case(nbytes=1 << 20, tensors=100, repeats=1).kwargs
    assert kwargs == models.stack_kwargs(tensors=100, nbytes=1 << 20)
    weights = models.make_live(kwargs, "cpu").weights()
    assert models.check(weights, kwargs) == 100
    assert len({models.code_of(i) for i in range(92_000)}) == 92_000
    for i, at in ((0, 0), (57, -1)):
        wrong = [weight.clone() for weight in weights]
        wrong[i].view(-1)[at] = 3.0
        with pytest.raises(AssertionError, match=str(i)):
            models.check(wrong, kwargs)
    with pytest.raises(AssertionError, match="other values"):
        models.check(weights[1:] + weights[:1], kwargs)
    with pytest.raises(AssertionError, match="no memory"):
        models.check([torch.empty_like(weight, device="meta") for weight in weights], kwargs)


def test_a_worker_goes_on_when_told_and_says_why_it_failed(tmp_path: Path) -> None:
    harness = importlib.import_module("_cuda_harness")
    code = "print('{\"a\": 1}', flush=True); input(); raise SystemExit('no luck')"
    with harness.Worker([sys.executable, "-c", code], {}, tmp_path / "log") as worker:
        assert worker.step() == {"a": 1}
        with pytest.raises(harness.WorkerError, match="no luck"):
            worker.step()
    assert worker.process.returncode == 1


def test_a_measurement_waits_for_a_quiet_moment_but_not_for_ever(tmp_path: Path) -> None:
    worker, path = importlib.import_module("_cuda_worker"), tmp_path / "quiet.json"
    first = worker.wait_for_quiet(path)
    assert first["python_ms"] > 0
    assert json.loads(path.read_text())["least_ms"] == first["python_ms"]
    path.write_text(json.dumps({"least_ms": first["python_ms"] / 1000, "left_s": 0.3}))  # as if the machine had been much faster
    assert worker.wait_for_quiet(path)["waited_s"] >= 0.3
    left = json.loads(path.read_text())
    assert left["left_s"] == 0.0, "what a run may wait in all is used up"
    assert left["least_ms"] == first["python_ms"] / 1000
    path.write_text(json.dumps({"least_ms": 1e9, "left_s": 0.0}))
    found = worker.wait_for_quiet(path)
    assert json.loads(path.read_text())["least_ms"] == found["python_ms"]
