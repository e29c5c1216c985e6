"""What a process computes first on the CPU may be wrong where several threads do it: no build or load is that first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from torchwcache.module.vml import FUNCTIONS

ROTARY = """
import torch
from torch import nn

class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        angles = torch.outer(torch.arange(256.0), torch.arange(16.0))
        self.register_buffer("cosines", angles.cos(), persistent=False)
"""
WATCH = """
import json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    calls = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
        if tensors:
            self.calls.append((function.overloadpacket._qualified_op_name, str(tensors[0].dtype), tensors[0].numel()))
        return function(*args, **(kwargs or {}))
"""
ATTACH = """
from safetensors.torch import save_file
from torchwcache import ModelConfig, WeightCache
from rotary import Rotary

save_file({"weight": torch.zeros(4, 4)}, "rotary.safetensors")
with Watch(), WeightCache.attach(ModelConfig("rotary.safetensors", build=Rotary), mode="off") as model:
    cosines = model.cosines
expected = torch.outer(torch.arange(256.0), torch.arange(16.0)).cos()
assert torch.equal(cosines, expected)
"""
DIRECTLY = """
from rotary import Rotary

with Watch():
    Rotary()
"""


def calls(script: str, folder: Path) -> list[tuple[str, str, int]]:
    """What a new process called of the functions in question, in order: name, dtype, numel."""
    (folder / "rotary.py").write_text(ROTARY)
    (folder / "script.py").write_text(f"{WATCH}{script}\nprint(json.dumps(Watch.calls))")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHWCACHE")}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    names = {name(function) for function in FUNCTIONS}
    return [tuple(call) for call in json.loads(done.stdout.splitlines()[-1]) if call[0] in names]


def name(function: Any) -> str:
    return f"aten::{function.__name__.removeprefix('special_')}"


def test_a_model_is_not_the_first_to_compute(tmp_path: Path) -> None:
    found = calls(ATTACH, tmp_path)
    first: dict[tuple[str, str], int] = {}
    for function, dtype, numel in found:
        first.setdefault((function, dtype), numel)
    assert first.keys() == {(name(f), str(dtype)) for f in FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert max(first.values()) < 2048, "torch gives what is larger to several threads"
    assert ("aten::cos", "torch.float32", 4096) in found, "the model computes, later"


def test_without_the_cache_it_may_be(tmp_path: Path) -> None:
    assert calls(DIRECTLY, tmp_path) == [("aten::cos", "torch.float32", 4096)]


@pytest.mark.parametrize("mode", ["FakeTensorMode()", "Elsewhere()"])
def test_it_is_not_taken_for_done_where_nothing_was_computed(mode: str, tmp_path: Path) -> None:
    """Within a mode that makes other tensors of it, it is either done all the same, or left to the next build."""
    script = f"""
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torchwcache.module.one_at_a_time import one_at_a_time

class Elsewhere(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {{}})
        if "device" in kwargs:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)

with {mode}, one_at_a_time():
    pass
with Watch(), one_at_a_time():
    torch.ones(4096).cos()
"""
    found = [numel for function, dtype, numel in calls(script, tmp_path) if function == "aten::cos" and dtype == "torch.float32"]
    assert found == ([8, 4096] if "Fake" in mode else [4096])


def test_it_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchwcache.module import vml
    from torchwcache.module.one_at_a_time import one_at_a_time

    with one_at_a_time():
        pass
    monkeypatch.setattr(vml, "FUNCTIONS", (pytest.fail,))
    with one_at_a_time():
        pass


def test_every_function_that_torch_takes_from_the_library() -> None:
    """By its own header, which its wheels have."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "cpu" / "vml.h"
    said = set(re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", header.read_text(), re.MULTILINE))
    assert {"cos", "exp", "sqrt"} <= said
    assert said == {function.__name__.removeprefix("special_") for function in FUNCTIONS}
