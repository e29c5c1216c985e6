"""Build and load plain modules (``ModelConfig(build=...)``) and Transformers models (a folder with a ``config.json``)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn

from torchwcache.adapter import CaptureRules, Description, LoadContext, LoadResult
from torchwcache.config import ModelConfig
from torchwcache.errors import BuildError, WeightCacheError
from torchwcache.identity.code import tree_code_fields
from torchwcache.loaders.base import Loader
from torchwcache.loaders.huggingface import HuggingFaceLoader
from torchwcache.loaders.registry import LOADERS
from torchwcache.module.construct import build_on_meta, build_parameters_on_meta, parameters_on_meta, resolve_callable
from torchwcache.module.graph import type_name
from torchwcache.quantization.block_fp8_config import BlockFP8Settings, requested_settings
from torchwcache.quantization.block_fp8_method import BlockFP8
from torchwcache.quantization.block_fp8_replace import quantize_linears
from torchwcache_nn.conversions import NUMBERS, OBJECTS, restore_conversions, stamp_conversions

__all__ = ["NNAdapter"]

_TRANSFORMERS_IGNORED = {
    "generation_config": "read from generation_config.json by every client (design D19)",
    "generation_config.*": "read from generation_config.json by every client (design D19)",
    "*_commit_hash": "says from which revision of a repo this process got the files, not what is in them",
    "*name_or_path": "says where this process found the files, not what is in them",
}


class NNAdapter:
    """Plain modules through the ``safetensors`` loader, Transformers folders through ``huggingface``."""

    name = "nn"
    version = "1"

    def accepts(self, cfg: ModelConfig) -> bool:
        """Everything that names no adapter."""
        return True

    def loader(self, cfg: ModelConfig) -> Loader:
        """The loader that a config names, or the usual one."""
        return LOADERS.get(cfg.loader or ("huggingface" if cfg.build is None else "safetensors"))

    def describe(self, cfg: ModelConfig, module: nn.Module) -> Description:
        """Describe the model by its config and its classes."""
        loader = self.loader(cfg)
        files = loader.files(cfg)
        fields: dict[str, Any] = {"class": type_name(type(module)), "classes": tree_code_fields(module)}
        settings = self._settings(cfg, loader)
        if settings is not None:
            fields["quantization"] = {**settings.identity(), "version": BlockFP8.version}
        elif cfg.quantization_config:
            fields["quantization"] = dict(cfg.quantization_config)
        packages: tuple[str, ...] = ()
        if isinstance(loader, HuggingFaceLoader):
            fields["config"] = {k: v for k, v in loader.config(cfg).to_dict().items() if k != "_name_or_path"}
            packages = ("transformers",)
        dtype = cfg.dtype or str(getattr(module, "dtype", "")).removeprefix("torch.")
        return Description(
            fields=fields,
            checkpoint=files,
            source=str(Path(cfg.checkpoint).resolve()) if Path(cfg.checkpoint).exists() else cfg.checkpoint,
            quantization_config=loader.quantization_config(cfg),
            label=f"{type(module).__name__} {dtype}".strip(),
            loader=loader,
            packages=packages,
            computes=settings is not None and settings.at_load,
        )

    @staticmethod
    def _settings(cfg: ModelConfig, loader: Loader) -> BlockFP8Settings | None:
        if isinstance(loader, HuggingFaceLoader):
            return loader.settings(cfg)
        return requested_settings(cfg, loader.quantization_config(cfg))

    def _quantized(self, cfg: ModelConfig, module: nn.Module) -> nn.Module:
        """A plain module with its layers quantized at load, where that is asked for; on meta: the layers that this will give."""
        settings = self._settings(cfg, self.loader(cfg))
        return quantize_linears(module, settings) if settings is not None and settings.at_load else module

    def build(self, cfg: ModelConfig) -> tuple[nn.Module, str]:
        """Build on meta; where an ``__init__`` computes with tensors of its own, only the parameters are on meta."""
        loader = self.loader(cfg)
        if isinstance(loader, HuggingFaceLoader) and cfg.build_meta is None:
            return self._build_transformers(cfg, loader)
        try:
            return self._mode(self._quantized(cfg, build_on_meta(cfg))), "meta"
        except BuildError as first:
            if cfg.build_meta is not None:
                raise
            try:
                return self._mode(self._quantized(cfg, build_parameters_on_meta(cfg))), "parameters-meta"
            except BuildError:
                raise first from first.__cause__

    def _build_transformers(self, cfg: ModelConfig, loader: HuggingFaceLoader) -> tuple[nn.Module, str]:
        try:
            with init_empty_weights(include_buffers=True):
                return self._mode(loader.build_module(cfg)), "meta"
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as first:
            # What is wrong with the folder or the options has nothing to do with the meta device.
            if isinstance(first, WeightCacheError) and not isinstance(first, BuildError):
                raise
            loader.model_class(cfg, loader.config(cfg))
            try:
                with parameters_on_meta():
                    return self._mode(loader.build_module(cfg)), "parameters-meta"
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                raise BuildError(
                    f"the model of {cfg.checkpoint} cannot be built on the meta device: {type(first).__name__}: {first}. Pass "
                    "ModelConfig(build_meta=...), a callable that makes the same module without its weights"
                ) from first

    @contextmanager
    def scratch_build(self, cfg: ModelConfig) -> Iterator[tuple[nn.Module, str]]:
        """Plain modules register themselves nowhere, so a second build is like the first."""
        yield self.build(cfg)

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Load by the loader's own pipeline, set evaluation mode, and run ``finalize``."""
        loader = self.loader(cfg)
        settings = self._settings(cfg, loader)
        if settings is not None and settings.at_load:
            context = _beside_segments(context, cfg.device)
        result = loader.load(cfg, context)
        transformers = isinstance(loader, HuggingFaceLoader)
        module = self._mode(result.module if transformers else self._quantized(cfg, result.module))
        if transformers:
            stamp_conversions(module, cfg.build_kwargs)
        if cfg.finalize is not None:
            changed = resolve_callable(cfg.finalize, "finalize")(module)
            module = changed if isinstance(changed, nn.Module) else module
        return LoadResult(module=module, initialized=result.initialized, notes=result.notes)

    def rules(self, cfg: ModelConfig, module: nn.Module) -> CaptureRules:
        """Transformers keeps in the module what belongs to the process: where the files were found, the generation config."""
        if not isinstance(self.loader(cfg), HuggingFaceLoader):
            return CaptureRules()
        ignored = dict(_TRANSFORMERS_IGNORED)
        if NUMBERS in module.__dict__:
            ignored[OBJECTS] = "made anew from the numbers of the registered conversions"
        return CaptureRules(ignore=ignored)

    def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
        """Read what every client reads for itself."""
        loader = self.loader(cfg)
        if not isinstance(loader, HuggingFaceLoader):
            return
        restore_conversions(module, cfg.build_kwargs)
        if hasattr(module, "generation_config"):
            from transformers import GenerationConfig

            # Without such a file a model keeps the one that its build derived from the model's config, as in from_pretrained.
            with contextlib.suppress(OSError):
                module.__dict__["generation_config"] = GenerationConfig.from_pretrained(loader.folder(cfg))

    @staticmethod
    def _mode(module: nn.Module) -> nn.Module:
        return module.eval()


def _beside_segments(context: LoadContext, device: str) -> LoadContext:
    """For weights that are only read to be quantized: what is published are others, and segments cannot shrink."""

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    return dataclasses.replace(context, allocate=allocate, expect=lambda sizes: None)
