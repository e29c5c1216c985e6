"""Build and load models by vLLM's own code, for one start of one rank."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchwcache.adapter import CaptureRules, Description, LoadContext, LoadResult
from torchwcache.config import ModelConfig, Role
from torchwcache.engine_memory import allocator_nbytes, note_growth
from torchwcache.errors import CheckpointNotFoundError, RebindError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.identity.code import tree_code_fields
from torchwcache.module.construct import build_without_weights
from torchwcache.module.graph import children, is_leaf, type_name
from torchwcache.module.shapes import shapes_digest
from torchwcache_vllm.identity import config_fields, variables
from torchwcache_vllm.registries import Registered, Registries
from torchwcache_vllm.unwritten import not_given_by_target, watched
from torchwcache_vllm.warmup import listening, say_again

__all__ = ["Stage", "VLLMAdapter"]

Stage = Literal["finished", "loaded"]
"""What is published: weights as they serve, or as they were before vLLM's work after loading, which every process then does."""

_IGNORED = {
    "*name_or_path": "says where this process found the files, not what is in them",
    "*_commit_hash": "says from which revision of a repo this process got the files, not what is in them",
    "*._forward_method": "which kernel a layer calls: by the options of this process",
}
# What vLLM's decorator for torch.compile keeps in a model (``compilation/decorators.py``, ``wrapper.py``; 0.26 to 0.33).
_OF_THE_COMPILER = (
    "_allow_aot_compile", "_aot_cache_dir", "_aot_compilation_path", "_bytecode_hook_handle", "_compile_prefix", "_compile_tag",
    "_compiled_bytecode", "_compiled_callable", "_dynamic_arg_dims", "_is_encoder", "aot_compiled_fn", "compiled", "do_not_compile",
    "evaluate_guards", "first_compile", "layerwise_nvtx_tracing_enabled", "was_aot_compile_fn_loaded_from_disk",
)  # fmt: skip
_IGNORED.update({f"*.{name}": "how this process compiles the model" for name in _OF_THE_COMPILER})
_KERNELS = ("moe_kernel", "moe_quant_config")
"""What a layer's quantization method makes of finished weights and cannot be carried. Since 0.30 vLLM makes it anew on request."""
_STAMP = "_torchwcache_kernels"
# Computed from the weights after loading; nothing writes to them, and with MLA they are gigabytes.
_CONSTANTS = (
    "*.W_UV",
    "*.W_UK_T",
    "*.W_UK",
    "*.W_K",
    "*.W_V",
    "*.W_K_scale",
    "*.W_V_scale",
    "*.W_UK_T_dcp_qrep",
    "*.cos_sin_cache",
)
_CONFIG_SUFFIXES = (".json", ".py")
_MAX_DEPTH = 8


class _DefaultLoader:
    """vLLM's ``DefaultModelLoader``, as it enters the fingerprint."""

    name = "vllm-default"
    version = "1"


class VLLMAdapter:
    """One model of one vLLM worker.

    Args:
        vllm_config: The worker's live configuration.
        model_config: Of the model to load: the target's or a draft's.
        load_config: For vLLM's own loader: without our keys, ``load_format="auto"``.
        prefix: As the engine calls the loader.
        stage: What is published; see :data:`Stage`.
    """

    name = "vllm"
    version = "3"

    def __init__(self, vllm_config: Any, model_config: Any, load_config: Any, *, prefix: str = "", stage: Stage) -> None:
        self.vllm_config, self.model_config, self.load_config = vllm_config, model_config, load_config
        self.prefix, self.stage = prefix, stage
        self._registries = Registries.of(vllm_config)
        self._registered: dict[int, Registered] = {}
        self._installed: Registered | None = None
        self._processed: set[int] = set()
        self.put_off = False
        """Whether :meth:`prepare` leaves :meth:`process` to the caller: before the engine has its model runner, for instance."""

    # ---- building ------------------------------------------------------------------------------------------------------------

    def accepts(self, cfg: ModelConfig) -> bool:
        """Never by itself: it is made for one start."""
        return False

    @contextmanager
    def _engine_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_current_vllm_config(self.vllm_config), set_default_torch_dtype(self.model_config.dtype):
            yield

    def build(self, cfg: ModelConfig) -> tuple[nn.Module, str]:
        """Build on meta as vLLM's own loader builds, leaving the engine's registries as they were.

        Where a model computes with tensors of its own (the placement of experts), only its parameters are on meta.

        Raises:
            BuildError: The model class cannot be built without its weights.
        """
        what = f"vLLM's model of {cfg.checkpoint}"
        # Whatever the model's own code raises when a value is not there.
        return build_without_weights(self._built, torch.device(cfg.device), failures=(Exception,), what=what)

    def _built(self, device: torch.device) -> nn.Module:
        from vllm.model_executor.model_loader.utils import initialize_model

        drawing = [device] if device.type == "cuda" else []
        aside, random = self._registries.aside(), torch.random.fork_rng(devices=drawing)
        with self._engine_context(), aside as registered, listening(self.vllm_config) as registered.kernels, random, device:
            module: nn.Module = initialize_model(vllm_config=self.vllm_config, model_config=self.model_config, prefix=self.prefix)
        self._registered[id(module)] = registered
        return module.eval()

    @contextmanager
    def scratch_build(self, cfg: ModelConfig) -> Iterator[tuple[nn.Module, str]]:
        """As :meth:`build`, which leaves no trace either."""
        yield self.build(cfg)

    # ---- describing ----------------------------------------------------------------------------------------------------------

    def describe(self, cfg: ModelConfig, module: nn.Module) -> Description:
        """Describe the model by vLLM's configuration, its version and the files that its loader will open."""
        import vllm

        fields: dict[str, Any] = {
            "class": type_name(type(module)),
            "classes": tree_code_fields(module),
            "vllm": {"version": str(vllm.__version__), "commit": getattr(vllm, "__commit_id__", None)},
            "stage": self.stage,
            "shapes": shapes_digest(module),
            "config": config_fields(self.vllm_config, self.model_config),
            "variables": variables(),
        }
        return Description(
            fields=fields,
            checkpoint=self._files(module),
            source=str(Path(cfg.checkpoint).resolve()) if Path(cfg.checkpoint).exists() else cfg.checkpoint,
            quantization_config=self._quantization_config(),
            label=f"vLLM {type(module).__name__} {str(self.model_config.dtype).removeprefix('torch.')}",
            loader=_DefaultLoader(),
            packages=("transformers", "compressed-tensors"),
            computes=True,
        )

    def _quantization_config(self) -> dict[str, Any] | None:
        stated = getattr(self.model_config.hf_config, "quantization_config", None)
        if stated is not None:
            return dict(stated if isinstance(stated, dict) else stated.to_dict())
        if self.model_config.quantization is not None:
            return {"quant_method": str(self.model_config.quantization), "requested": True}
        return None

    def _files(self, module: nn.Module) -> CheckpointFiles:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        loader = DefaultModelLoader(self.load_config)
        primary = DefaultModelLoader.Source(
            self.model_config.model,
            self.model_config.revision,
            fall_back_to_pt=getattr(module, "fall_back_to_pt_during_load", True),
            allow_patterns_overrides=getattr(module, "allow_patterns_overrides", None),
        )
        files: dict[str, Path] = {}
        for number, source in enumerate((primary, *getattr(module, "secondary_weights", ()))):
            prefix = f"{number}/" if number else ""
            folder, weights = self._prepare(loader, source)
            files.update({prefix + os.path.relpath(path, folder): Path(path) for path in weights})
            for path in sorted(folder.iterdir()):
                if path.name.endswith(_CONFIG_SUFFIXES) and not path.name.startswith(("tokenizer", "generation_config")):
                    files[prefix + path.name] = path
        root = Path(self.model_config.model)
        return CheckpointFiles(root if root.is_dir() else None, tuple(sorted(files.items())))

    @staticmethod
    def _prepare(loader: Any, source: Any) -> tuple[Path, list[str]]:
        available = {
            "model_name_or_path": source.model_or_path,
            "subfolder": getattr(source, "subfolder", None),
            "revision": source.revision,
            "fall_back_to_pt": source.fall_back_to_pt,
            "allow_patterns_overrides": source.allow_patterns_overrides,
        }
        wanted = inspect.signature(loader._prepare_weights).parameters
        try:
            folder, weights, *_ = loader._prepare_weights(**{name: available[name] for name in wanted})
        except (OSError, RuntimeError) as error:
            raise CheckpointNotFoundError(
                f"vLLM finds no weights at {source.model_or_path}: {error}", path=str(source.model_or_path)
            ) from error
        return Path(folder), list(weights)

    # ---- loading -------------------------------------------------------------------------------------------------------------

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Load by vLLM's default loader: the whole of it, or (stage ``loaded``) all but its work after loading."""
        from vllm.model_executor.model_loader import base_loader
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        self._install(None)
        with self._registries.recording() as registered, watched(base_loader) if context.publishes else nullcontext() as watch:
            module = self._load(cfg, DefaultModelLoader(self.load_config))
        self._registered[id(module)] = self._installed = registered
        unwritten = () if watch is None else watch.names
        if unwritten and cfg.role is Role.DRAFT:
            unwritten = not_given_by_target(unwritten, module, self.vllm_config)
        return LoadResult(module=module.eval(), unwritten=unwritten)

    def _load(self, cfg: ModelConfig, loader: Any) -> nn.Module:
        module: nn.Module
        if self.stage == "finished":
            before = allocator_nbytes(cfg.device)
            module = loader.load_model(vllm_config=self.vllm_config, model_config=self.model_config, prefix=self.prefix)
            note_growth(module, before, cfg.device)
            module.__dict__[_STAMP] = _kernels(module)
            self._processed.add(id(module))
            return module
        from vllm.model_executor.model_loader import base_loader

        with self._engine_context():
            with torch.device(cfg.device):
                module = base_loader.initialize_model(
                    vllm_config=self.vllm_config, model_config=self.model_config, prefix=self.prefix
                )
            loader.load_weights(module, self.model_config)
        return module

    def _install(self, registered: Registered | None) -> None:
        """Let the engine find the layers of one of the modules made here, or of none."""
        if self._installed is not None:
            self._registries.remove(self._installed)
        if registered is not None:
            self._registries.add(registered)
        self._installed = registered

    # ---- carrying ------------------------------------------------------------------------------------------------------------

    def rules(self, cfg: ModelConfig, module: nn.Module) -> CaptureRules:
        """The engine's live configuration belongs to the process; kernels over finished weights are made in each."""
        ignored = {**_IGNORED, **dict.fromkeys(_config_paths(module), "the engine's live configuration")}
        if module.__dict__.get(_STAMP):
            ignored.update({f"*.{name}": "made anew by vLLM, over weights that are processed already" for name in _KERNELS})
        return CaptureRules(ignore=ignored, constants=_CONSTANTS)

    def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
        """Make this module the one that the engine finds, and (unless put off) do what every process does for itself."""
        self._install(self._registered[id(module)])
        if not self.put_off:
            self.process(cfg, module)

    def process(self, cfg: ModelConfig, module: nn.Module) -> None:
        """Work after loading that is not in what was published, and what building the module left to do. Idempotent.

        Raises:
            RebindError: vLLM makes other kernels here than where the entry was published.
        """
        if id(module) in self._processed:
            return
        self._processed.add(id(module))
        say_again(self._registered[id(module)].kernels)
        with self._engine_context():
            if self.stage == "loaded":
                from vllm.model_executor.model_loader.utils import process_weights_after_loading

                process_weights_after_loading(module, self.model_config, torch.device(cfg.device))
            else:
                _make_kernels(module)


def _kernels(module: nn.Module) -> dict[str, dict[str, str]]:
    """The kernels that vLLM made after loading: path of the layer to attributes and their classes.

    Empty when vLLM cannot make every one of them anew: then none is left out of what is captured, and the capture refuses.
    """
    try:
        from vllm.model_executor.utils import weights_already_processed  # noqa: F401 - is it there?
    except ImportError:
        return {}
    found: dict[str, dict[str, str]] = {}
    for path, layer in module.named_modules():
        method = getattr(layer, "quant_method", None)
        made = {name: type_name(type(value)) for name in _KERNELS if (value := getattr(method, name, None)) is not None}
        if made and not getattr(method, "supports_pre_processed_weights", False):
            return {}
        if made:
            found[path] = made
    return found


def _make_kernels(module: nn.Module) -> None:
    wanted = module.__dict__.get(_STAMP) or {}
    if not wanted:
        return
    from vllm.model_executor.utils import weights_already_processed

    before = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in module.named_parameters()}
    with weights_already_processed():
        for path in wanted:
            layer: Any = module.get_submodule(path)
            layer.quant_method.process_weights_after_loading(layer)
    made = _kernels(module)
    problems = [
        (path, f"vLLM makes {made.get(path, 'no kernel')} here, and made {kernels} where it was published")
        for path, kernels in wanted.items()
        if made.get(path) != kernels
    ]
    after = {name: (tensor.data_ptr(), tensor.shape, tensor.dtype) for name, tensor in module.named_parameters()}
    problems += [
        (name, "vLLM replaced this tensor, although it was processed already") for name in before if after.get(name) != before[name]
    ]
    if problems:
        raise RebindError("the kernels of this process do not fit the published weights:", problems=problems)


def _config_paths(module: nn.Module) -> list[str]:
    """Where modules, and what they hold, refer to the engine's configuration objects."""
    found: list[str] = []
    seen: set[int] = set()

    def look(obj: Any, path: str, depth: int) -> None:
        if is_leaf(obj) or isinstance(obj, torch.Tensor) or id(obj) in seen or depth > _MAX_DEPTH:
            return
        seen.add(id(obj))
        for kind, key, value in children(obj):
            if kind not in ("attribute", "slot", "key", "index") or isinstance(value, nn.Module):
                continue
            place = f"{path}[{key!r}]" if kind in ("key", "index") else f"{path}.{key}" if path else str(key)
            if type(value).__module__.startswith("vllm.config"):
                found.append(place)
            else:
                look(value, place, depth + 1)

    for path, child in module.named_modules():
        look(child, path, 0)
    return found
