"""On a GPU a checkpoint in block FP8 is loaded into Transformers' own FP8 modules, and the build without weights makes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from support import fp8_models

from torchwcache.adapter import LoadContext
from torchwcache.config import ModelConfig
from torchwcache.loaders.huggingface import HuggingFaceLoader
from torchwcache.quantization.registry import check_config, check_tensors


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "modules"), [("qwen3_wide", {"FP8Linear"}), ("qwen3_moe", {"FP8Linear", "FP8Experts"})])
def test_the_load_and_the_build_make_transformers_own_modules(kind: str, modules: set[str], tmp_path: Path) -> None:
    fp8_models.make_model(kind).save_pretrained(tmp_path)
    fp8_models.quantize_folder(tmp_path, fp8_models.BLOCKS[kind])
    loader, cfg = HuggingFaceLoader(), ModelConfig(tmp_path, device="cuda:0")
    context = LoadContext(
        allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device="cuda:0"),
        expect=lambda sizes: None,
        read_file=lambda fd, offset, target: None,
        progress=lambda done, total: None,
    )
    loaded = loader.load(cfg, context).module
    with init_empty_weights(include_buffers=True):
        built = loader.build_module(cfg)
    assert {type(child).__name__ for child in loaded.modules() if "FP8" in type(child).__name__} == modules
    assert all(parameter.is_cuda for parameter in loaded.parameters())
    assert any(parameter.dtype is torch.float8_e4m3fn for parameter in loaded.parameters())
    kinds = [[(name, type(child)) for name, child in module.named_modules()] for module in (loaded, built)]
    shapes = [{name: (p.shape, p.dtype) for name, p in module.named_parameters()} for module in (loaded, built)]
    assert kinds[0] == kinds[1]
    assert shapes[0] == shapes[1]
    stated = loader.quantization_config(cfg)
    check_tensors(check_config(stated, None), loaded, stated)
