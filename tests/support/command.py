"""The command line as a user runs it, and a checkpoint for a module with one linear layer, ``inner``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def torchwcache(*argv: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchwcache", *argv],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def write_project(folder: Path, name: str, source: str) -> Path:
    """A module of that name, and its checkpoint ``net.safetensors``."""
    (folder / f"{name}.py").write_text(source)
    torch.manual_seed(0)
    inner = torch.nn.Linear(16, 16)
    save_file({f"inner.{key}": value for key, value in inner.state_dict().items()}, folder / "net.safetensors")
    return folder
