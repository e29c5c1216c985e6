"""A start from disk without the cache, the first with it, the next: the same tokens, and the last reads no weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def settled(folder, wait_until):
    """Until the stat of the files can be relied on, the first start reads them twice."""
    newest = max(path.stat().st_ctime for path in folder.iterdir())
    wait_until(lambda: time.time() > newest + 2.1, what="the files' stat can be relied on")


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mla"])
def test_the_same_tokens_and_no_weights_read(kind, run, checkpoints, watch, wait_until):
    model = checkpoints(kind)
    settled(model, wait_until)
    reads = watch([model / "model.safetensors"])
    without, lines = run(model, options={"load_format": "auto"})
    assert lines == ""
    assert reads.seen()  # the watch sees what it is to see

    first, lines = run(model)
    assert "one rank, target: miss (not in the cache): loaded by the engine" in lines
    assert reads.seen()
    second, lines = run(model)
    assert "one rank, target: hit: " in lines
    assert "nothing read" in lines
    seen = reads.seen()
    if kind == "tied":
        # vLLM itself looks into the header, for the names of tensors, when it makes its configuration of a tied model.
        code = f"from vllm.engine.arg_utils import EngineArgs; EngineArgs(model={str(model)!r}).create_engine_config()"
        environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        subprocess.run([sys.executable, "-c", code], check=True, env=environ, capture_output=True, timeout=120)
        assert seen == reads.seen()
    else:
        assert seen == {}
    assert first == second == without
    assert len({tuple(tokens) for tokens in first}) > 1 or kind == "mla"


@pytest.mark.parametrize("kind", ["dense", "moe", "mla"])
def test_finished_weights(kind, run, checkpoints):
    """As on a GPU: what is shared is what vLLM's work after loading left; a hit only makes kernels anew (moe, mla)."""
    model, stage = checkpoints(kind), {"TORCHWCACHE_VLLM_STAGE": "finished"}
    without, _ = run(model, plain_linear=True, options={"load_format": "auto"})
    first, lines = run(model, plain_linear=True, environment=stage)
    assert "published" in lines
    second, lines = run(model, plain_linear=True, environment=stage)
    assert ": hit: " in lines
    assert first == second == without


def test_kernels_that_layers_want_compiled_are_the_same(vllm, checkpoints):
    """Layers say so while they are built, and on a hit they were built before there was a runner that listens."""
    model, heard = checkpoints("small"), []
    for options, said in (({"load_format": "auto"}, ""), ({}, "published"), ({}, ": hit: ")):
        engine = vllm(model, options=options, warm_up=True)
        heard.append(engine.result()["heard"])
        engine.end()
        assert said in "\n".join(engine.lines)
    assert heard[0] == heard[1] == heard[2]
    assert len(heard[0]) == 1  # of all layers: they say the same


def test_tied_embeddings_with_a_head_in_the_checkpoint(run, checkpoints, tmp_path):
    """vLLM builds it untied, looks at the values, and ties it again after loading if they are equal."""
    stage = {"TORCHWCACHE_VLLM_STAGE": "finished"}
    sizes, answers = [], []
    for how in ("equal-head", "other-head"):
        model = tmp_path / how
        command = [sys.executable, str(HERE / "checkpoints.py"), how, str(checkpoints("tied")), str(model)]
        subprocess.run(command, check=True, timeout=120)
        without, _ = run(model, plain_linear=True, options={"load_format": "auto"})
        first, lines = run(model, plain_linear=True, environment=stage)
        published = re.search(r"([\d,]+) bytes published", lines)
        assert published, lines
        second, lines = run(model, plain_linear=True, environment=stage)
        assert ": hit: " in lines
        assert first == second == without
        sizes.append(int(published[1].replace(",", "")))
        answers.append(first)
    assert sizes[1] - sizes[0] >= 1000 * 128 * 4  # the embedding, once more
    assert answers[0] != answers[1]


def test_compiled_and_not(run, checkpoints):
    """Layers keep which operators they call, so these are two entries."""
    model = checkpoints("small")
    without, _ = run(model, options={"load_format": "auto", "enforce_eager": False})
    first, lines = run(model, options={"enforce_eager": False})
    assert "published" in lines
    second, lines = run(model, options={"enforce_eager": False})
    assert ": hit: " in lines
    assert first == second == without
    _, lines = run(model)
    assert "compilation.mode" in lines
    assert "published" in lines


def test_what_cannot_be_carried_is_refused_in_words_and_the_engine_serves(run, vllm, checkpoints):
    """On the CPU the finished weights lie in the private memory of vLLM's kernels."""
    model, stage = checkpoints("small"), {"TORCHWCACHE_VLLM_STAGE": "finished"}
    without, _ = run(model, options={"load_format": "auto"})
    first, lines = run(model, environment=stage)
    assert "not published (CaptureError" in lines
    assert "cpu_linear" in lines
    second, lines = run(model, environment=stage)
    assert "RefusedError" in lines
    assert first == second == without
    log = vllm(model, environment={**stage, "TORCHWCACHE_FALLBACK": "error"}).fails()
    assert "RefusedError" in log


def test_in_processes_of_its_own(run, checkpoints):
    """As `vllm serve` does it: engine core and worker are other processes than the one that was asked."""
    model = checkpoints("small")
    first, lines = run(model, in_process=False)
    assert "published" in lines
    second, lines = run(model, in_process=False)
    assert ": hit: " in lines
    assert first == second


def test_a_fine_tune_in_place_is_another_model(run, checkpoints, tmp_path):
    import shutil

    model = tmp_path / "model"
    shutil.copytree(checkpoints("small"), model)
    first, _ = run(model)
    shutil.copy(checkpoints("small", 1) / "model.safetensors", model / "model.safetensors")
    second, lines = run(model)
    assert "miss (the cached entry differs in checkpoint.content" in lines
    assert second != first


def test_a_copy_elsewhere_is_the_same_model(run, checkpoints, tmp_path):
    import shutil

    first, _ = run(checkpoints("small"))
    shutil.copytree(checkpoints("small"), tmp_path / "copy")
    second, lines = run(tmp_path / "copy")
    assert ": hit: " in lines
    assert first == second
