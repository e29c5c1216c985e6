"""The models by shape, end to end at toy width: loaded in one process, attached in the next, outputs equal bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = ["toy_qwen_fused", "toy_qwen_unfused", "toy_ling_fused", "toy_ling_unfused"]

WRITE = """
import sys, torch, _shapes
from safetensors.torch import save_file
for name in sys.argv[2:]:
    torch.manual_seed(0)
    model = getattr(_shapes, name)()
    for tensor in model.parameters():
        raw = torch.randn(tensor.shape) * 0.1
        tensor.data = raw.abs() + 0.01 if tensor.dtype is torch.float32 else raw.to(tensor.dtype)
    save_file(model.state_dict(), f"{sys.argv[1]}/{name}.safetensors")
"""

ATTACH = """
import hashlib, json, sys, torch
from torchwcache import ModelConfig, WeightCache
for name in sys.argv[2:]:
    cfg = ModelConfig(f"{sys.argv[1]}/{name}.safetensors", build=f"_shapes:{name}", quantization="fp8")
    attachment = WeightCache.attach(cfg, mode="client", fallback="error")
    with attachment as model, torch.inference_mode():
        out = model(torch.arange(12).view(2, 6))
        digest = hashlib.sha256(out.float().numpy().tobytes()).hexdigest()
    report = attachment.report
    print(json.dumps({"name": name, "source": report.source, "digest": digest, "finite": bool(out.isfinite().all()),
                      "copied": report.copied_nbytes, "tensors": report.tensors}))
"""


def run(script: str, socket: str, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), *NAMES],
        env={**os.environ, "TORCHWCACHE_SOCKET": socket, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_loaded_and_attached_compute_the_same(daemon: Any, tmp_path: Path) -> None:
    run(WRITE, daemon.socket, tmp_path)
    loaded, attached = run(ATTACH, daemon.socket, tmp_path), run(ATTACH, daemon.socket, tmp_path)
    assert [item["source"] for item in loaded] == ["disk"] * len(NAMES)
    assert [item["source"] for item in attached] == ["cache"] * len(NAMES)
    for one, two in zip(loaded, attached, strict=True):
        assert one["finite"]
        assert one["digest"] == two["digest"]
        assert two["copied"] == 0


def test_the_benchmark_runs(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "full_size_shapes.py"), "--quick", "--out", str(out)],
        capture_output=True,
        timeout=200,
        check=True,
    )
    result = json.loads(out.read_text())
    assert {row["model"] for row in result["rows"]} == {"Qwen3-235B-A22B", "Ling-2.6-1T-like"}
    assert not result["complete"]
    assert len(result["targets"]) == 4


@pytest.mark.slow
def test_full_size_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trillion weights exist as shapes, and the gate and the fingerprint see each of them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _shapes
    from accelerate import init_empty_weights

    from torchwcache.quantization.registry import check_tensors

    with init_empty_weights(include_buffers=True):
        models = {shape.name: _shapes.Model(shape) for shape in (_shapes.QWEN3_235B, _shapes.LING_1T)}
    for name, (low, high) in {"Qwen3-235B-A22B": (230e9, 240e9), "Ling-2.6-1T-like": (0.95e12, 1.05e12)}.items():
        weights = sum(p.numel() for n, p in models[name].named_parameters() if not n.endswith("scale_inv"))
        assert low < weights < high
        check_tensors("fp8", models[name])
