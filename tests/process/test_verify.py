"""``torchwcache verify``: two processes, one that loads and one that attaches, compared down to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command import torchwcache, write_project

from torchwcache.cli.exit_codes import ExitCode
from torchwcache.verification.record import record_id

MODULE = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.inner.weight
        self.register_buffer("steps", torch.zeros(3), persistent=False)
        self.parts = [self.inner.weight.detach()[:2]]
        self.mode = "eager"

    def forward(self, x):
        return self.tied(self.inner(x)) + len(self.mode)

def inputs(model):
    return {"x": torch.randn(2, model.inner.in_features)}

def chatter(model):
    print("this must not be taken for an answer")
    return (torch.ones(1, model.inner.in_features),)

def stamp(module):
    # Work after loading that is not a function of the checkpoint: the very thing that must be found out.
    change = os.environ.get("CHANGE", "")
    with torch.no_grad():
        if "bit" in change:
            module.inner.bias.view(torch.int32)[0] ^= 1
        if "attribute" in change:
            module.mode = "flash attention"
        if "untied" in change:
            module.tied.weight = nn.Parameter(module.inner.weight.clone())
        if "view" in change:
            module.parts[0] = module.parts[0].clone()
        if "shape" in change:
            module.steps = torch.zeros(4)
        if "added" in change:
            module.more = torch.ones(2)
"""
MODEL = ("net.safetensors", "--build", "net_to_verify:Net", "--build-kwargs", '{"width": 16}')


@pytest.fixture
def project(tmp_path: Path) -> Path:
    save_file({"x": torch.ones(3, 16)}, tmp_path / "in.safetensors")
    return write_project(tmp_path, "net_to_verify", MODULE)


def record_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    assert record_id(found) == found["id"]
    return found


def test_equal_from_end_to_end(project: Path, daemon: Any) -> None:
    loaded = torchwcache("load", *MODEL, "--json", cwd=project)
    assert loaded.returncode == 0, loaded.stderr
    ran = torchwcache("verify", *MODEL, "--deep", "--inputs", "net_to_verify:chatter", "--json", "out.json", cwd=project)
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, "equal"), ran.stdout + ran.stderr
    record = record_of(project / "out.json")
    assert record["fingerprint"] == json.loads(loaded.stdout)["fingerprint"]
    assert record["differences"] == []
    assert record["compared"]["outputs"] == 1
    # The tied weight, the bias, the buffer and the view; the view lies in the weight's memory.
    assert (record["compared"]["tensors"], record["compared"]["nbytes"]) == (5, 16 * 16 * 4 + 16 * 4 + 3 * 4)
    assert record["versions"]["torch"] == torch.__version__.split("+")[0] or record["versions"]["torch"] == torch.__version__
    assert record["model"] == {"build": "net_to_verify:Net", "build_kwargs": '{"width": 16}'}
    assert record["id"] in ran.stdout
    printed = torchwcache("verify", *MODEL, "--deep", "--inputs", "in.safetensors", "--json", "-", cwd=project)
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["compared"]["output_nbytes"] == 3 * 16 * 4


def test_every_difference_is_named(project: Path, daemon: Any) -> None:
    """The entry was made by a load that did other things: all of them are told, by path, and the exit code says so."""
    model = (*MODEL, "--finalize", "net_to_verify:stamp")
    changed = torchwcache("load", *model, cwd=project, CHANGE="bit attribute untied view added")
    assert changed.returncode == 0, changed.stderr
    ran = torchwcache("verify", *model, "--deep", "--inputs", "net_to_verify:inputs", "--json", "out.json", cwd=project)
    assert ran.returncode == ExitCode.DIFFERENT, ran.stdout + ran.stderr
    record = record_of(project / "out.json")
    assert record["equal"] is False
    found = {(item["path"], item["what"]) for item in record["differences"]}
    expected = {
        ("inner.bias", "values (xxh3-128)"),
        ("inner.bias", "bytes of its memory (xxh3-128)"),
        ("mode", "attribute"),
        ("tied.weight", "is the same tensor as"),
        ("parts[0]", "shares memory with"),
        ("more", "tensor"),
        ("output", "output's values (xxh3-128)"),
    }
    assert found >= expected
    assert all(f"{path}: {what}" in ran.stdout for path, what in expected)


def test_what_is_not_cached_is_an_error(project: Path, daemon: Any) -> None:
    ran = torchwcache("verify", *MODEL, cwd=project)
    assert ran.returncode == ExitCode.NOT_FOUND
    assert "not in the cache" in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert torchwcache("status", "--json", cwd=project).stdout.count('"key"') == 0


def test_no_daemon_is_an_error_and_none_is_started(project: Path) -> None:
    assert torchwcache("verify", *MODEL, cwd=project).returncode == ExitCode.NO_DAEMON
    assert torchwcache("status", cwd=project).returncode == ExitCode.NO_DAEMON


def test_wrong_uses_are_told(project: Path, daemon: Any) -> None:
    assert torchwcache("load", *MODEL, cwd=project).returncode == 0
    without = torchwcache("verify", *MODEL, "--inputs", "in.safetensors", cwd=project)
    assert (without.returncode, "--deep" in without.stderr) == (ExitCode.USAGE, True)
    unknown = torchwcache("verify", *MODEL, "--deep", cwd=project)
    assert (unknown.returncode, "--inputs" in unknown.stderr) == (ExitCode.USAGE, True)
    raising = torchwcache("verify", *MODEL, "--deep", "--inputs", "net_to_verify:nothing", cwd=project)
    assert (raising.returncode, "nothing" in raising.stderr) == (ExitCode.USAGE, True)
    late = torchwcache("verify", *MODEL, "--timeout", "0.01", cwd=project)
    assert (late.returncode, "--timeout" in late.stderr) == (ExitCode.ERROR, True)


@pytest.mark.slow
def test_inputs_for_a_transformers_model_are_generated(tmp_path: Path, daemon: Any) -> None:
    pytest.importorskip("transformers")
    made = subprocess.run(
        [sys.executable, "-m", "torchwcache.cli.demo_worker", "tiny", "--make-tiny"], cwd=tmp_path, timeout=120, check=False
    )
    assert made.returncode == 0
    assert torchwcache("load", "tiny", cwd=tmp_path).returncode == 0
    ran = torchwcache("verify", "tiny", "--deep", "--json", "out.json", cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    record = record_of(tmp_path / "out.json")
    assert (record["label"], record["inputs"]) == ("LlamaForCausalLM", "generated")
    assert record["compared"]["outputs"] == 5  # the logits, and the keys and values of two layers
    assert record["compared"]["opaque"] == []
    assert "generation_config" in record["ignored"]
