"""Find the files of a safetensors checkpoint. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from torchwcache.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

__all__ = ["find_index", "find_shards", "quantization_config_of", "read_index", "read_json"]

_USUAL_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises:
        CheckpointNotFoundError: There is no such file.
        CorruptCheckpointError: It is not JSON, or not an object.
    """
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: no such file", path=str(path)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", path=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path}: is not valid JSON: {error}", path=str(path)) from error
    if not isinstance(data, dict):
        raise CorruptCheckpointError(f"{path}: holds {type(data).__name__} where an object is needed", path=str(path))
    return data


def read_index(path: Path) -> dict[str, str]:
    """Read an index: tensor name to name of the shard, all shards known to exist beside it.

    Raises:
        CorruptCheckpointError: There is no usable ``weight_map``, or it points out of the folder.
        CheckpointNotFoundError: A shard is missing; the message names it.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptCheckpointError(f'{path}: has no "weight_map" from tensor names to files', path=str(path))
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or PurePosixPath(shard).is_absolute() or ".." in PurePosixPath(shard).parts:
            raise CorruptCheckpointError(
                f"{path}: {name!r} is said to lie in {shard!r}, which is no file beside it", path=str(path)
            )
    missing = sorted(shard for shard in set(weight_map.values()) if not (path.parent / shard).is_file())
    if missing:
        raise CheckpointNotFoundError(
            f"{path}: names {len(missing)} shard(s) that do not exist: {', '.join(missing[:10])}. Complete the download",
            path=str(path),
            shards=tuple(missing),
        )
    return weight_map


def _is_beside(shard: object) -> bool:
    return isinstance(shard, str) and shard != "" and shard[0] != "/" and ".." not in PurePosixPath(shard).parts


def find_index(folder: Path) -> Path | None:
    """The index of a folder: the usual one, else the only ``*.index.json`` with a ``weight_map``, else ``None``.

    Raises:
        CheckpointError: There are several, and none of them is the usual one.
    """
    if (usual := folder / _USUAL_INDEX).is_file():
        return usual
    # An index of pickled shards does not make this a checkpoint of ours.
    found = [path for path in sorted(folder.glob("*.index.json")) if _indexes_safetensors(path)]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: has several indexes ({names}); give the path of the one that is meant", path=str(folder))
    return found[0] if found else None


def _indexes_safetensors(path: Path) -> bool:
    weight_map = read_json(path).get("weight_map")
    return isinstance(weight_map, dict) and any(str(shard).endswith(".safetensors") for shard in weight_map.values())


def find_shards(folder: Path) -> tuple[str, ...]:
    """Names of the files that hold a folder's weights, its index included.

    Raises:
        CheckpointNotFoundError: There are no safetensors files, or a shard is missing.
    """
    index = find_index(folder)
    if index is not None:
        return tuple(sorted({index.name, *read_index(index).values()}))
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        hint = f"; only safetensors are read, not {', '.join(pickles[:5])}: convert them" if pickles else ""
        raise CheckpointNotFoundError(f"{folder}: holds no *.safetensors file{hint}", path=str(folder))
    return tuple(shards)


def quantization_config_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """The quantization that a ``config.json`` states, at its top or in a nested config (``text_config`` and its like)."""
    for key in ("quantization_config", "compression_config"):
        stated = config.get(key)
        if stated:
            return stated if isinstance(stated, dict) else {"quant_method": str(stated)}
    for key, nested in config.items():
        if isinstance(nested, dict) and key.endswith("_config") and (found := quantization_config_of(nested)) is not None:
            return found
    return None
