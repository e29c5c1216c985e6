"""Values of SGLang's as a fingerprint can hold them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchwcache.encoding import encode
from torchwcache.errors import EncodingError
from torchwcache.module.graph import type_name

__all__ = ["plain", "resolved_path"]


def plain(value: Any) -> Any:
    """A value with a canonical form: what has none is told apart by its class and its text, where that names no address."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, (set, frozenset)) else items
    try:
        encode(value)
    except EncodingError:
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict) and state:
            return {"class": type_name(type(value)), **{str(name): plain(item) for name, item in state.items()}}
        text = repr(value)
        return (type_name(type(value)), text if " at 0x" not in text else "")
    return value


def resolved_path(path: str) -> str:
    """A local path without links and dots; anything else (a repo id) as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path
