"""How SGLang builds a model on the meta device, and how it loads one for real: the engine's side of an attach.

An adapter is made for one start of one model in one rank. It works inside the contexts that SGLang has set up when it asks its
loader for a model: the published configuration, the process groups, the device.
"""

from __future__ import annotations

import copy
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwcache.adapter import CaptureRules, Description, LoadContext, LoadResult
from torchwcache.config import ModelConfig, Parallelism, Role
from torchwcache.engine_memory import allocator_nbytes, note_growth
from torchwcache.errors import BuildError, CheckpointError, WeightCacheError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.identity.code import tree_code_fields
from torchwcache.module.construct import build_without_weights
from torchwcache.module.graph import type_name
from torchwcache.module.shapes import shapes_digest
from torchwcache_sglang.canonical import plain, resolved_path, without_itself
from torchwcache_sglang.context import environment_names, option, parallel_layout, resolved_options
from torchwcache_sglang.registries import Registries
from torchwcache_sglang.unwritten import given_by_target, watched

__all__ = ["SGLangAdapter", "model_config_for"]

_PACKAGES = (
    "sglang", "sglang-kernel", "sgl-kernel", "transformers", "triton", "flashinfer-python", "flashinfer-cubin", "deep-gemm",
    "sgl-deep-gemm", "compressed-tensors", "torchao", "aiter", "vllm", "tilelang", "nvidia-cutlass-dsl",
)  # fmt: skip

_IGNORED = {
    "*_name_or_path": "says where this process found the files, not what is in them",
    "*_commit_hash": "says from which revision of a repo this process got the files, not what is in them",
    "*routed_experts_weights_of_layer": "where --enable-eplb finds the weights that it moves; it is refused",
    "*context_len": "how long requests may get; where a model's build looks at it, it is part of the fingerprint",
}
_PROCESS = {
    "sglang.srt.distributed.parallel_state:GroupCoordinator": "the ranks' connections, each process's own",
    "sglang.srt.server_args:ServerArgs": "how this server was started; what counts of it is in the fingerprint",
    "sglang.srt.runtime_context:_ConfigBag": "how this server was started; what counts of it is in the fingerprint",
    "sglang.srt.eplb.expert_location:ExpertLocationMetadata": "where experts lie; it is in the fingerprint",
    "torch._C._distributed_c10d:ProcessGroup": "the ranks' connections, each process's own",
}
_CONSTANTS = ("*.w_kc", "*.w_vc", "*.w_scale", "*.w_scale_k", "*.w_scale_v")
"""What multi-head latent attention derives from ``kv_b_proj`` after loading: gigabytes, and nothing writes them afterwards."""

_NOT_WEIGHTS = ("_name_or_path", "_commit_hash", "transformers_version", "context_len")


class _Loader:
    """What reads the files: SGLang's own loader."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.version = "1"


class SGLangAdapter:
    """One model in one rank.

    Args:
        inner: SGLang's own loader for it, without our options.
        model_config: SGLang's ``ModelConfig``.
        device_config: SGLang's ``DeviceConfig``.
    """

    name = "sglang"
    version = "2"

    def __init__(self, inner: Any, model_config: Any, device_config: Any) -> None:
        self.inner, self.model_config, self.device_config = inner, model_config, device_config
        self._left = Registries()

    def accepts(self, cfg: ModelConfig) -> bool:
        """Only what was made for this start."""
        return cfg.adapter == self.name

    # ---- what it is ----------------------------------------------------------------------------------------------------------

    def describe(self, cfg: ModelConfig, module: nn.Module) -> Description:
        """By SGLang's resolved options and the model's config, as they are before the load.

        Raises:
            BuildError: SGLang does not answer as its known releases do; the engine can start without the cache.
        """
        try:
            return self._described(module)
        except WeightCacheError:
            raise
        except _FAILURES as error:
            raise BuildError(f"SGLang's state cannot be read: {type(error).__name__}: {error} ({_where(error)})") from error

    def _described(self, module: nn.Module) -> Description:
        model_config, load_config = self.model_config, self.inner.load_config
        index = getattr(load_config, "draft_model_idx", None)
        source = resolved_path(str(model_config.model_path))
        return Description(
            fields={
                "class": type_name(type(module)),
                "classes": tree_code_fields(module),
                "shapes": shapes_digest(module),
                "config": self._config(module),
                "options": resolved_options(source),
                "layout": parallel_layout(),
                "experts": _expert_placement(),
                "platform": _platform(),
                "load": {
                    "format": str(getattr(load_config.load_format, "value", load_config.load_format)),
                    "ignored_files": plain(load_config.ignore_patterns),
                    "draft_model": index,
                },
            },
            checkpoint=self._files(module),
            source=source if index is None else f"{source}#{index}",
            quantization_config=self._quantization_config(),
            label=f"{type(module).__name__} {str(model_config.dtype).removeprefix('torch.')}",
            loader=_Loader(type(self.inner).__name__),
            packages=_PACKAGES,
            env_names=environment_names(os.environ),
            computes=True,
        )

    def _config(self, module: nn.Module) -> dict[str, Any]:
        config = self.model_config.hf_config
        found = {name: plain(without_itself(value)) for name, value in config.to_dict().items() if name not in _NOT_WEIGHTS}
        if _build_reads("context_len", module):
            found["context_len"] = getattr(config, "context_len", None)
        return {
            "model": found,
            "dtype": self.model_config.dtype,
            "quantization": self.model_config.quantization,
            "draft": bool(getattr(self.model_config, "is_draft_model", False)),
            "embedding": not getattr(self.model_config, "is_generation", True),
        }

    def _quantization_config(self) -> Mapping[str, Any] | None:
        config = getattr(self.model_config.hf_config, "quantization_config", None)
        if config is None:
            text = getattr(self.model_config, "hf_text_config", None)
            config = getattr(text, "quantization_config", None) or getattr(self.model_config.hf_config, "compression_config", None)
        if config is None:
            # Quantized while loading: no checkpoint says so, the option does.
            method = self.model_config.quantization
            return None if method is None else {"quant_method": str(method)}
        stated: Mapping[str, Any] = without_itself(config if isinstance(config, Mapping) else config.to_dict())
        return stated

    def _files(self, module: nn.Module) -> CheckpointFiles:
        """What the loader is going to open, as it says itself; and what decides how it reads that."""
        named: dict[str, Path] = {}
        roots: list[Path] = []
        for folder, paths in self._sources(module):
            root = Path(folder)
            if root not in roots:
                roots.append(root)
            prefix = "" if root == roots[0] else f"{roots.index(root)}/"
            others = [*root.glob("*.index.json"), root / "config.json", root / "hf_quant_config.json"]
            if self.model_config_trusts_code():
                others += root.rglob("*.py")
            for path in [*map(Path, paths), *filter(Path.is_file, others)]:
                inside = path.is_relative_to(root)
                named[prefix + (str(path.relative_to(root)) if inside else str(path))] = path
        if not named:
            raise CheckpointError(f"{self.model_config.model_path}: no weight files were found", path=self.model_config.model_path)
        return CheckpointFiles(roots[0], tuple(sorted(named.items())))

    @staticmethod
    def model_config_trusts_code() -> bool:
        """Whether Python files that come with the checkpoint are run."""
        from sglang.srt.runtime_context import get_model

        return bool(get_model().trust_remote_code)

    def _sources(self, module: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
        if hasattr(self.inner, "resolve_model_weights"):  # 0.5.18 and newer
            resolved = self.inner.resolve_model_weights(self.model_config, module)
            return [(str(item.hf_folder), tuple(item.weight_files)) for item in resolved]
        from sglang.srt.model_loader import loader as sglang_loader

        found = []
        first = sglang_loader.DefaultModelLoader.Source.init_new(self.model_config, module)
        for source in (first, *getattr(module, "secondary_weights", ())):
            folder, files, safe = self.inner._prepare_weights(source.model_or_path, source.revision, source.fall_back_to_pt)
            more = getattr(sglang_loader, "maybe_add_mtp_safetensors", None)
            if more is not None and safe and getattr(source, "model_config", None) is not None:
                files = more(files, folder, "model.safetensors.index.json", source.model_config.hf_config)
            found.append((str(folder), tuple(files)))
        return found

    # ---- building ------------------------------------------------------------------------------------------------------------

    def build(self, cfg: ModelConfig) -> tuple[nn.Module, str]:
        """Build on meta, within SGLang's contexts; where a model computes with tensors of its own, only the parameters."""
        what = f"SGLang's model for {self.model_config.model_path}"
        return build_without_weights(self._built, torch.device(self.device_config.device), failures=_FAILURES, what=what)

    def _built(self, device: torch.device) -> nn.Module:
        from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        registries = Registries()
        # A build may change the config that it is given, and a load is to start from what the engine has.
        load_config = copy.copy(self.inner.load_config)
        with registries.apart(), torch.random.fork_rng(devices=[]), set_default_torch_dtype(self.model_config.dtype):
            quantization = _get_quantization_config(self.model_config, load_config)
            with device:
                module: nn.Module = _initialize_model(self.model_config, load_config, quantization)
        self._left = registries
        return module.eval()

    @contextmanager
    def scratch_build(self, cfg: ModelConfig) -> Iterator[tuple[nn.Module, str]]:
        """Every build is one from scratch, and leaves the registries as they were."""
        left = self._left
        try:
            yield self.build(cfg)
        finally:
            self._left = left

    # ---- loading -------------------------------------------------------------------------------------------------------------

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """SGLang's own loader, with all that it does after loading."""
        from sglang.srt.model_loader import loader as sglang_loader

        registries, before = Registries(), allocator_nbytes(cfg.device)
        with registries.apart(), watched(sglang_loader) if context.publishes else nullcontext() as watch:
            module = self.inner.load_model(model_config=self.model_config, device_config=self.device_config)
        note_growth(module, before, cfg.device)
        self._left = registries
        unwritten = () if watch is None else watch.names
        if unwritten and getattr(self.model_config, "is_draft_model", False):
            given = given_by_target(module, str(option("speculative_algorithm")))
            unwritten = tuple(name for name in unwritten if name not in given)
        return LoadResult(module=module, unwritten=unwritten)

    def rules(self, cfg: ModelConfig, module: nn.Module) -> CaptureRules:
        """What says where things are, and what attention derives from its weights."""
        return CaptureRules(ignore=_IGNORED, constants=_CONSTANTS, process=_PROCESS)

    def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
        """Leave in the process what SGLang's loader leaves there, and set the mode."""
        self._left.keep()
        module.eval()


def _where(error: BaseException) -> str:
    """The innermost three places of what failed in SGLang's code or on the way there: whoever reports it has only the log."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    return ", ".join(f"{Path(place.filename).name}:{place.lineno} in {place.name}" for place in reversed(places))


_FAILURES = (AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""What SGLang's and torch's code raise for a value that is not there, and in a release that is not as we know it."""


def model_config_for(model_config: Any, device: str, *, options: Any) -> ModelConfig:
    """Our config for one of SGLang's, in this rank."""
    layout = parallel_layout()
    sizes = {axis: int(layout.get(f"{name}_size") or 1) for axis, name in _AXES.items()}
    ranks = {axis: int(layout.get(f"{name}_rank") or 0) for axis, name in _AXES.items()}
    parallel = Parallelism(
        tp_size=sizes["tp"], tp_rank=ranks["tp"], pp_size=sizes["pp"], pp_rank=ranks["pp"], ep_size=sizes["ep"], ep_rank=ranks["ep"]
    )
    return ModelConfig(
        str(model_config.model_path),
        device=device,
        parallel=parallel,
        role=Role.DRAFT if getattr(model_config, "is_draft_model", False) else Role.TARGET,
        identity=options.identity,
        adapter=SGLangAdapter.name,
        revision=getattr(model_config, "revision", None),
        ignore=options.ignore,
        constants=options.constants,
    )


_AXES = {"tp": "tp", "pp": "pp", "ep": "moe_ep"}


def _expert_placement() -> Any:
    """Which expert lies where; two placements of the same size make different shards."""
    try:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        metadata = get_global_expert_location_metadata()
    except (ImportError, RuntimeError, AttributeError, ValueError):
        return None
    placement = getattr(metadata, "physical_to_logical_map_cpu", getattr(metadata, "physical_to_logical_map", None))
    return None if placement is None else placement.tolist()


def _platform() -> dict[str, Any]:
    from sglang.srt import utils

    return {
        name: bool(check())
        for name in ("is_cuda", "is_hip", "is_cpu", "is_npu", "is_xpu", "cpu_has_amx_support")
        if callable(check := getattr(utils, name, None))
    }


def _build_reads(attribute: str, module: nn.Module) -> bool:
    """Whether the code of a class in the tree names an attribute of the config."""
    for name in {type(item).__module__ for item in module.modules()}:
        if name.startswith("torch."):
            continue
        try:
            if attribute in inspect.getsource(sys.modules[name]):
                return True
        except (KeyError, OSError, TypeError):
            return True  # code that nobody can look at may read anything
    return False
