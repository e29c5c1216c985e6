"""Values of SGLang's as a fingerprint can hold them."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwcache.encoding import encode
from torchwcache.errors import EncodingError
from torchwcache.module.graph import type_name

__all__ = ["plain", "resolved_path", "without_itself"]


_MAX_DEPTH = 32


def plain(value: Any) -> Any:
    """A value with a canonical form: what has none is told apart by its class and its text, where that names no address.

    Raises:
        ValueError: It goes so deep that it is no option's value any more.
    """
    return _plain(value, [])


def _plain(value: Any, inside: list[int]) -> Any:
    if id(value) in inside:
        return ("again", len(inside) - inside.index(id(value)))  # so many levels up
    if len(inside) > _MAX_DEPTH:
        raise ValueError(f"a {type_name(type(value))} more than {_MAX_DEPTH} levels inside a value")
    inside.append(id(value))
    try:
        if isinstance(value, Mapping):
            return {str(key): _plain(item, inside) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            items = [_plain(item, inside) for item in value]
            return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        try:
            encode(value)
        except EncodingError:
            state = getattr(value, "__dict__", None)
            if isinstance(state, dict) and state:
                return {"class": type_name(type(value)), **{str(name): _plain(item, inside) for name, item in state.items()}}
            text = repr(value)
            return (type_name(type(value)), text if " at 0x" not in text else "")
        return value
    finally:
        inside.pop()


def without_itself(value: Any) -> Any:
    """A value of a model's config without the config: SGLang puts it into the quantization's part (``hf_config``) when it builds.

    There it would bring in again what is left out on purpose, such as where the files lie.
    """
    if not isinstance(value, Mapping):
        return value
    return {key: without_itself(item) for key, item in value.items() if key != "hf_config"}


def resolved_path(path: str) -> str:
    """A local path without links and dots; anything else (a repo id) as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
