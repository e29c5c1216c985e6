"""The loader for plain modules: a safetensors file, or a folder of shards with or without an index."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.config import ModelConfig
from torchwcache.errors import BuildError, CheckpointNotFoundError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.loaders.fill import fill, load_with_pytorch, match, why_pytorch_must_load
from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint
from torchwcache.loaders.shards import find_shards, quantization_config_of, read_index, read_json
from torchwcache.module import construct
from torchwcache.module.replace import iter_tensors

__all__ = ["SafetensorsCheckpoint", "SafetensorsLoader"]

_CONFIG = "config.json"


class SafetensorsLoader:
    """Builds ``cfg.build`` and fills it by name, as ``load_state_dict`` does. Neither calls ``finalize`` nor sets the mode."""

    name = "safetensors"
    version = "1"

    def files(self, cfg: ModelConfig) -> CheckpointFiles:
        """The file itself; or the index, the shards, and a ``config.json`` for what it says about quantization.

        Raises:
            CheckpointNotFoundError: There is nothing there, or a shard is missing.
            CorruptCheckpointError: The index is malformed.
        """
        path = Path(cfg.checkpoint)
        if path.is_dir():
            names = find_shards(path)
            return CheckpointFiles.in_folder(path, [*names, _CONFIG] if (path / _CONFIG).is_file() else names)
        if not path.exists():
            raise CheckpointNotFoundError(
                f"{path}: no such checkpoint; expected a safetensors file or a folder of them", path=str(path)
            )
        if path.name.endswith(".index.json"):
            return CheckpointFiles.in_folder(path.parent, [path.name, *read_index(path).values()])
        return CheckpointFiles.single(path)

    def quantization_config(self, cfg: ModelConfig) -> Mapping[str, Any] | None:
        """What a ``config.json`` beside the weights says, if there is one."""
        config = Path(cfg.checkpoint) / _CONFIG
        return quantization_config_of(read_json(config)) if config.is_file() else None

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Build the module without its weights, give it memory, and read the weights into that.

        Raises:
            CheckpointError: Files are missing, corrupt, or do not fit the module.
            BuildError: The module cannot be built.
        """
        with SafetensorsCheckpoint(self.files(cfg)) as checkpoint:
            notes: list[str] = []
            device = torch.empty(0, device=cfg.device).device  # with its index
            reason: str | None = None
            try:
                module = construct.build_parameters_on_meta(cfg)
                reason = why_pytorch_must_load(module, checkpoint)
                # Code of the module's own may read what is there already, or leave it as it is: then it must be there.
                lost = construct.valueless(module) if reason else construct.materialize(module, context.allocate, context.expect)
                why = f"no checkpoint holds the values of these: {_shown(lost)}"
            except BuildError as error:
                # Clients build by the hook that the user gave for this very case; the producer can build as always.
                if cfg.build_meta is None:
                    raise
                lost, why = ["__init__"], f"its __init__ needs the values of its parameters: {error.__cause__}"
            in_full = bool(lost or reason)
            if in_full:
                module = construct.build_for_real(cfg)
            module = _moved(module, device)
            if lost:
                notes.append(f"built in full, since {why}")
            hidden = _parameters_at(module, lost)
            if (reason := why_pytorch_must_load(module, checkpoint)) is not None:
                notes.append(f"built in full and loaded by load_state_dict, with one more copy in memory: {reason}")
                missing = load_with_pytorch(module, checkpoint, strict=cfg.strict)
                return LoadResult(module=module, initialized=(*missing, *hidden), notes=notes)
            found = match(module, checkpoint, strict=cfg.strict)
            if found.missing and not in_full:
                # What the checkpoint lacks keeps the values that __init__ gives it, which only a full build has.
                module = _moved(construct.build_for_real(cfg), device)
                found = match(module, checkpoint, strict=cfg.strict)
            if found.unexpected:
                notes.append(f"not used: {_shown(found.unexpected)}")
            fill(checkpoint, found.loads, read_file=context.read_file, device=device, progress=context.progress)
        return LoadResult(module=module, initialized=(*found.missing, *hidden), notes=notes)


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """What ``__init__`` made on the CPU goes where whoever writes ``build().to(device)`` would have it."""
    return module if device.type == "cpu" else module.to(device)


def _parameters_at(module: nn.Module, paths: list[str]) -> list[str]:
    """Those of the paths that hold parameters: initialized by the build, and by nothing else."""
    if not paths:
        return []
    found = dict(iter_tensors(module).values())
    return [path for path in paths if isinstance(found.get(path), nn.Parameter)]


def _shown(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
