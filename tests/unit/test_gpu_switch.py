"""GPU tests are skipped without a GPU, and fail where one is required: a skip must never pass for a test that ran."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what happens without a CUDA device")
@pytest.mark.parametrize(("required", "word", "code"), [("", "skipped", 0), ("1", "error", 1)])
def test_the_switch(required: str, word: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "TORCHWCACHE_REQUIRE_CUDA": required},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert word in done.stdout
    assert done.returncode == code
