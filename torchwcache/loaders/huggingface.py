"""The loader for Transformers checkpoints: Transformers' own full pipeline, ``from_pretrained``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.config import ModelConfig
from torchwcache.errors import (
    BuildError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StateDictError,
    UnsupportedQuantizationError,
)
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.loaders.hub import FolderCache
from torchwcache.loaders.shards import quantization_config_of, read_index, read_json
from torchwcache.quantization.block_fp8_config import (
    BlockFP8Settings,
    name_of,
    problem_of,
    requested_settings,
    settings_of,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint

__all__ = ["HuggingFaceLoader"]

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_NOT_FOR_US = frozenset({
    "adapter_kwargs", "allow_all_kernels", "cache_dir", "config", "device_map", "device_mesh", "distributed_config", "dtype",
    "force_download", "from_flax", "from_tf", "fusion_config", "gguf_file", "kernel_config", "local_files_only", "max_memory",
    "offload_buffers", "offload_folder", "output_loading_info", "revision", "state_dict", "subfolder", "torch_dtype", "tp_plan",
    "tp_size", "trust_remote_code", "use_kernels", "use_safetensors", "variant", "weights_only",
})  # fmt: skip
"""Arguments of ``from_pretrained`` that choose other files, places or kernels than the fingerprint says."""
_LOADING_ONLY = frozenset(
    {"disable_mmap", "fusion_config", "ignore_mismatched_sizes", "kernel_config", "key_mapping", "use_kernels"}
)
"""Arguments of ``from_pretrained`` that the model class itself does not know."""
_ROPE = ("rope_theta", "partial_rotary_factor")


class HuggingFaceLoader:
    """Loads what ``from_pretrained`` loads, in the way it does. Does not call ``finalize``."""

    name = "huggingface"
    version = "1"

    def __init__(self) -> None:
        self._folders = FolderCache()

    # ---- files -----------------------------------------------------------------------------------------------------------------

    def folder(self, cfg: ModelConfig) -> Path:
        """The local folder behind ``cfg.checkpoint``, downloaded if need be.

        Raises:
            CheckpointNotFoundError: Neither a folder nor a repo that can be reached or is in the cache.
        """
        return self._folders.folder(cfg)

    def files(self, cfg: ModelConfig) -> CheckpointFiles:
        """``config.json``, weights, index, and with ``trust_remote_code`` every Python file of the folder.

        Raises:
            CheckpointError: A file is missing, the weights are not safetensors, or the index is malformed.
        """
        self._kwargs(cfg)  # refused before anything is read
        folder = self.folder(cfg)
        config = self._raw_config(folder)
        names = ["config.json", *self._weights(folder, config)]
        if cfg.trust_remote_code:
            names += [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.py"))]
        if (folder / "adapter_config.json").is_file() and _installed("peft"):
            raise CheckpointError(
                f"{folder}: holds a PEFT adapter, which from_pretrained would add to the model; merge it and save the result",
                path=str(folder),
            )
        return CheckpointFiles.in_folder(folder, names)

    def _weights(self, folder: Path, config: Mapping[str, Any]) -> list[str]:
        stated = config.get("transformers_weights")  # a folder may name its weights itself
        extra = [name for name in _extra_files(config) if (folder / name).is_file()]
        candidates = (str(stated),) if stated is not None else (_WEIGHTS, _INDEX)
        for name in candidates:
            if not (folder / name).is_file():
                continue
            if name.endswith(".index.json"):
                return [name, *read_index(folder / name).values(), *extra]
            return [name, *extra]
        if any((folder / name).exists() for name in _PICKLES):
            raise CheckpointError(
                f"{folder}: holds pickled weights only; torchwcache reads safetensors only. Convert it once: load it with "
                "Transformers and call save_pretrained",
                path=str(folder),
            )
        raise CheckpointNotFoundError(f"{folder}: holds no {' and no '.join(candidates)}", path=str(folder))

    def _raw_config(self, folder: Path) -> dict[str, Any]:
        if not (folder / "config.json").is_file():
            raise CheckpointNotFoundError(
                f"{folder}: holds no config.json, so it is not a Transformers checkpoint; for a module of your own pass build=",
                path=str(folder),
            )
        return read_json(folder / "config.json")

    # ---- config and class ------------------------------------------------------------------------------------------------------

    def quantization_config(self, cfg: ModelConfig) -> Mapping[str, Any] | None:
        """What ``config.json`` says, also in nested configs; else what is passed to ``from_pretrained``."""
        return quantization_config_of(self._raw_config(self.folder(cfg))) or _asked(cfg)

    def settings(self, cfg: ModelConfig) -> BlockFP8Settings | None:
        """How the model's layers are block FP8, or become so at load; ``None`` when they are not.

        Raises:
            ConfigError: The user asks for something that cannot be.
        """
        stated, asked = quantization_config_of(self._raw_config(self.folder(cfg))), _asked(cfg)
        if stated is None and asked is not None and cfg.quantization in (None, "fp8"):
            if cfg.quantization_config:
                raise ConfigError("give quantization_config= or build_kwargs={'quantization_config': ...}, not both")
            return replace(settings_of(asked), at_load=True) if problem_of(asked) is None and name_of(asked) == "fp8" else None
        return requested_settings(cfg, stated)

    def config(self, cfg: ModelConfig) -> Any:
        """The Transformers config, with ``cfg.overrides`` in it.

        Raises:
            BuildError: Transformers does not know the model type, or must not run the checkpoint's own code.
            ConfigError: An override names something that this config does not have.
        """
        from transformers import AutoConfig

        folder = self.folder(cfg)
        raw = self._raw_config(folder)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=cfg.trust_remote_code)
            if cfg.overrides:
                name_or_path = config.name_or_path
                config = type(config).from_dict(_overridden(raw, config, cfg.overrides, "overrides"))
                config.name_or_path = name_or_path
        except (ValueError, KeyError, OSError, ImportError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise BuildError(
                f"{folder}: Transformers {_version()} cannot make a config of model type {raw.get('model_type')!r}: {error}"
            ) from error
        return config

    def model_class(self, cfg: ModelConfig, config: Any) -> Any:
        """The class to load: ``cfg.build``, else the checkpoint's own code if trusted, else the architecture of its config.

        Raises:
            BuildError: There is no such class, or the config names none.
        """
        import transformers

        if cfg.build is not None:
            from torchwcache.module.construct import resolve_callable

            return resolve_callable(cfg.build)
        architectures = getattr(config, "architectures", None) or []
        if not architectures:
            raise BuildError(f"{cfg.checkpoint}: its config names no architecture; say which class to load with build=")
        name = str(architectures[0])
        references = [ref for ref in (getattr(config, "auto_map", None) or {}).values() if _class_name(ref) == name]
        if references and cfg.trust_remote_code:
            return self._remote_class(cfg, str(references[0]))
        found = getattr(transformers, name, None)
        if isinstance(found, type) and hasattr(found, "_from_config"):
            return found
        advice = "pass trust_remote_code=True to run the checkpoint's own code" if references else "pass build="
        raise BuildError(f"{cfg.checkpoint}: unknown architecture {name!r}: Transformers {_version()} has no such model; {advice}")

    def _remote_class(self, cfg: ModelConfig, reference: str) -> Any:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        try:
            return get_class_from_dynamic_module(reference, self.folder(cfg))
        except (ImportError, OSError, ValueError, AttributeError, SyntaxError) as error:
            raise BuildError(f"{cfg.checkpoint}: its own code ({reference}) cannot be imported: {error}") from error

    # ---- building and loading --------------------------------------------------------------------------------------------------

    def build_module(self, cfg: ModelConfig) -> nn.Module:
        """Build the model without weights, as ``from_pretrained`` would, under whatever context the caller has entered.

        Raises:
            BuildError: The class cannot be built.
        """
        config = copy.deepcopy(self.config(cfg))
        cls = self.model_class(cfg, config)
        kwargs = {name: value for name, value in self._kwargs(cfg).items() if name not in _LOADING_ONLY}
        settings = self.settings(cfg)
        if settings is not None:
            kwargs.pop("quantization_config", None)
        try:
            module = cls._from_config(config, dtype=self._dtype(cfg, config), **kwargs)
        except (NotImplementedError, RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
            raise BuildError(f"{cls.__qualname__} cannot be built: {type(error).__name__}: {error}") from error
        if settings is not None:
            _fp8().prepare_build(module, settings, self.quantization_config(cfg), cfg.device)
        module.eval()
        # The marks that from_pretrained leaves: without them each would be a difference to carry and to set again at every attach.
        if hasattr(module, "set_use_kernels"):
            module.set_use_kernels(False)
        for child in module.modules():
            child._is_hf_initialized = True
        return module  # type: ignore[no-any-return]

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Run ``from_pretrained``.

        Raises:
            CheckpointError: Files are missing, corrupt, or do not fit the model.
            BuildError: The class cannot be built.
            UnsupportedQuantizationError: It cannot be quantized at load, as was asked for.
        """
        import torch
        from safetensors import SafetensorError

        from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint

        kwargs = self._kwargs(cfg)
        config, notes = self.config(cfg), []
        with SafetensorsCheckpoint(self.files(cfg)) as checkpoint:  # headers and index, with errors that name the file
            total = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
            if (settings := self.settings(cfg)) is not None:
                notes += self._prepare_fp8(cfg, settings, checkpoint, config, kwargs)
        cls = self.model_class(cfg, config)
        if cfg.seed is not None:
            torch.manual_seed(cfg.seed)
        context.progress(0, total)
        folder = self.folder(cfg)
        # Transformers' own error about sizes refers to a log; its report names each tensor.
        wanted = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs |= {} if cfg.device == "cpu" else {"device_map": {"": cfg.device}}
        kwargs["dtype"] = getattr(torch, cfg.dtype) if cfg.dtype is not None else "auto"
        try:
            try:
                module, report = _from_pretrained(cls, folder, config, kwargs)
            except UnsupportedQuantizationError as error:
                if settings is None or settings.at_load:
                    raise
                notes.append(f"loaded as Transformers does by itself: {error}")
                module, report = _from_pretrained(cls, folder, self.config(cfg), kwargs)
        except UnsupportedQuantizationError:
            raise
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{folder}: is truncated or corrupt: {error}", path=str(folder)) from error
        except RuntimeError as error:
            if "size" not in str(error) and "mismatch" not in str(error):
                raise
            raise StateDictError(f"{folder}: does not fit {cls.__qualname__}: {error}") from error
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise BuildError(f"{cls.__qualname__} cannot be loaded: {type(error).__name__}: {error}") from error
        context.progress(total, total)
        if report["mismatched_keys"] and not wanted:
            raise _sizes_differ(folder, cls, report["mismatched_keys"])
        initialized = sorted({*report["missing_keys"], *(item[0] for item in report["mismatched_keys"])})
        unexpected = sorted(report["unexpected_keys"])
        notes += [f"not used by {cls.__qualname__}: {', '.join(unexpected[:10])}"] if unexpected else []
        return LoadResult(module=module, initialized=initialized, notes=notes)

    def _prepare_fp8(
        self, cfg: ModelConfig, settings: BlockFP8Settings, checkpoint: SafetensorsCheckpoint, config: Any, kwargs: dict[str, Any]
    ) -> list[str]:
        """Make ``from_pretrained`` do what the settings say. A checkpoint that its config belies is loaded as without us."""
        if settings.at_load:
            kwargs["quantization_config"] = _fp8().quantization_argument(settings, cfg.device)
            return []
        kwargs.pop("quantization_config", None)
        if (why := _fp8().disagreement(checkpoint, settings)) is not None:
            return [f"loaded as Transformers does by itself: {why}"]
        _fp8().set_on_config(config, settings, self.quantization_config(cfg) or {}, cfg.device)
        return []

    def _kwargs(self, cfg: ModelConfig) -> dict[str, Any]:
        refused = sorted(_NOT_FOR_US & cfg.build_kwargs.keys())
        if refused:
            raise ConfigError(
                f"build_kwargs cannot hold {', '.join(refused)}: use the fields of ModelConfig, which count as identity"
            )
        return copy.deepcopy(dict(cfg.build_kwargs))

    def _dtype(self, cfg: ModelConfig, config: Any) -> torch.dtype:
        """What ``dtype="auto"`` comes to: the config's, else the index's, else that of the first floating tensor."""
        import torch

        name = cfg.dtype if cfg.dtype is not None else getattr(config, "dtype", None)
        if name is None:
            name = self._dtype_of_weights(cfg)
        return name if isinstance(name, torch.dtype) else getattr(torch, str(name).removeprefix("torch."))

    def _dtype_of_weights(self, cfg: ModelConfig) -> Any:
        import torch
        from safetensors import safe_open

        from torchwcache.loaders.safetensors_file import DTYPES

        files = self.files(cfg)
        for name, path in files.files:
            if name.endswith(".index.json") and (stated := read_json(path).get("metadata", {}).get("dtype")):
                return stated
        first = next(path for name, path in files.files if name.endswith(".safetensors"))
        with safe_open(first, framework="pt") as file:
            dtypes = [DTYPES[file.get_slice(name).get_dtype()] for name in file.keys()]  # noqa: SIM118 (it is no mapping)
        return next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else torch.get_default_dtype())


def _fp8() -> Any:
    try:
        from torchwcache.loaders import huggingface_fp8
    except (ImportError, AttributeError) as error:
        raise BuildError(f"Transformers {_version()} has another interface for FP8 than is known here: {error}") from error
    return huggingface_fp8


def _from_pretrained(cls: Any, folder: Path, config: Any, kwargs: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    module, report = cls.from_pretrained(
        folder,
        config=config,
        output_loading_info=True,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,
        **kwargs,
    )
    return module, report


def _asked(cfg: ModelConfig) -> dict[str, Any] | None:
    asked = cfg.build_kwargs.get("quantization_config")
    if asked is None:
        return None
    return dict(asked) if isinstance(asked, Mapping) else dict(asked.to_dict())


def _overridden(raw: Mapping[str, Any], config: Any, overrides: Mapping[str, Any], path: str) -> dict[str, Any]:
    """``raw`` with the overrides in it; nested configs are merged, everything else is replaced."""
    merged = copy.deepcopy(dict(raw))
    for name, value in overrides.items():
        where = f"{path}.{name}"
        nested = getattr(config, name, None)
        rope = getattr(config, "rope_parameters", None)
        if name in getattr(config, "sub_configs", {}) and isinstance(value, Mapping) and nested is not None:
            merged[name] = _overridden(merged.get(name) or {}, nested, value, where)
        elif name in _ROPE and isinstance(rope, Mapping) and not hasattr(config, name):
            # Since Transformers 5 these live in one dict, which wins over the old name without a word.
            if any(isinstance(item, Mapping) for item in rope.values()):
                raise ConfigError(f"{where}: this model has rope parameters for each layer type; override rope_parameters")
            merged["rope_parameters"] = {**rope, name: value}
        elif name in raw or hasattr(config, name):
            merged[name] = copy.deepcopy(value)
        else:
            raise ConfigError(f"{where}: {type(config).__name__} has no such field")
    return merged


def _sizes_differ(folder: Path, cls: Any, keys: Iterable[tuple[str, Any, Any]]) -> StateDictError:
    mismatched = sorted((name, f"{tuple(found)} in the checkpoint, {tuple(needed)} in the model") for name, found, needed in keys)
    shown = "; ".join(f"{name}: {sizes}" for name, sizes in mismatched[:10]) + ("; ..." if len(mismatched) > 10 else "")
    return StateDictError(
        f"{folder}: does not fit {cls.__qualname__}: the sizes of {len(mismatched)} tensors differ ({shown})", mismatched=mismatched
    )


def _extra_files(config: Mapping[str, Any]) -> tuple[str, ...]:
    from transformers import CONFIG_MAPPING

    try:
        return tuple(getattr(CONFIG_MAPPING[str(config.get("model_type"))], "extra_files", ()))
    except KeyError:
        return ()


def _class_name(reference: object) -> str:
    return str(reference).rpartition(".")[2]


def _installed(distribution: str) -> bool:
    from importlib.util import find_spec

    return find_spec(distribution) is not None


def _version() -> str:
    import transformers

    return str(transformers.__version__)
