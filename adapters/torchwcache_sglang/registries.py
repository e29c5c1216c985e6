"""What SGLang keeps in the process when it builds a model, saved and restored around a build (design D11).

Rotary embeddings are one object for the whole process (``get_rope`` remembers what it made), and every model that asks gets it as a
submodule. A model built on meta would leave embeddings without values there for the next one; a model that is loaded for real would
share one with a model of another entry. So each build starts with what it would find in a fresh process, and only the model that
is served leaves what it made.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Registries"]

_DICTS = (
    ("sglang.srt.layers.rotary_embedding.factory", "_ROPE_DICT"),
    ("sglang.srt.layers.rotary_embedding", "_ROPE_DICT"),
)
"""Dicts by module and name; one of several versions' places each, and none of them need exist."""


def _dicts() -> list[dict[Any, Any]]:
    found: dict[int, dict[Any, Any]] = {}
    for module, name in _DICTS:
        try:
            value = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if isinstance(value, dict):
            found[id(value)] = value
    return list(found.values())


@dataclass(slots=True)
class Registries:
    """What one build left in the registries; empty before it."""

    made: list[dict[Any, Any]] = field(default_factory=list)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Build with empty registries; what was there before is there again afterwards, whatever happens."""
        live = _dicts()
        before = [dict(item) for item in live]
        for item in live:
            item.clear()
        try:
            yield
        finally:
            self.made = [dict(item) for item in live]
            for item, content in zip(live, before, strict=True):
                item.clear()
                item.update(content)

    def keep(self) -> None:
        """Leave to later models what this build made, as SGLang's own loader does; what is there already stays."""
        for item, content in zip(_dicts(), self.made, strict=False):
            for key, value in content.items():
                item.setdefault(key, value)
