"""What building a vLLM model leaves outside the module: names of layers, shared rotary embeddings, counters (design D11).

vLLM finds attention and MoE layers by name through the compilation config, and gives every layer with the same rotary settings one
module. A second build in the same process would meet "Duplicate layer name", or get a rotary module that the first one owns.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torchwcache_vllm.warmup import Wanted

__all__ = ["Registered", "Registries"]

_OF_COMPILATION = ("static_forward_context", "static_all_moe_layers", "enabled_custom_ops", "disabled_custom_ops")

Contents = dict[str, Any]


class Registered:
    """What one build added, and (of a build aside) which kernels it wants compiled. Filled when the build is over."""

    def __init__(self) -> None:
        self.added: Contents = {}
        self.kernels: list[Wanted] = []


class Registries:
    """The registries that builds fill. They are changed in place, since others hold them too, and only by what a build added.

    Args:
        live: The registries by name: dicts, lists and counters.
        own: Names of those that a build aside must find empty.
    """

    def __init__(self, live: Mapping[str, Any], *, own: tuple[str, ...] = ()) -> None:
        self._live, self._own = dict(live), own

    @classmethod
    def of(cls, vllm_config: Any) -> Registries:
        """Those of vLLM, under one configuration."""
        from vllm.model_executor.layers import rotary_embedding

        compilation = vllm_config.compilation_config
        live = {name: getattr(compilation, name) for name in _OF_COMPILATION if hasattr(compilation, name)}
        return cls({**live, "rotary": rotary_embedding._ROPE_DICT}, own=("rotary",))

    def _now(self) -> Contents:
        return {name: found.copy() for name, found in self._live.items()}

    @contextlib.contextmanager
    def recording(self) -> Iterator[Registered]:
        """Note what a build adds, and leave it there."""
        registered, before = Registered(), self._now()
        yield registered
        registered.added = {name: _difference(found, before[name]) for name, found in self._live.items()}

    @contextlib.contextmanager
    def aside(self) -> Iterator[Registered]:
        """Note what a build adds, and take it away again: a module that is not (yet) the engine's."""
        before = self._now()
        for name in self._own:
            self._live[name].clear()
        try:
            with self.recording() as registered:
                yield registered
        finally:
            for name, found in self._live.items():
                found.clear()
                _add(found, before[name])

    def add(self, registered: Registered) -> None:
        """Register what a build added."""
        for name, added in registered.added.items():
            _add(self._live[name], added)

    def remove(self, registered: Registered) -> None:
        """Take away what a build added, as far as it is still there."""
        for name, added in registered.added.items():
            found = self._live[name]
            if isinstance(found, Counter):
                found.subtract(added)
            elif isinstance(found, dict):
                for key, value in added.items():
                    if found.get(key) is value:
                        del found[key]
            else:
                for item in added:
                    if item in found:
                        found.remove(item)


def _difference(now: Any, before: Any) -> Any:
    if isinstance(now, Counter):
        return now - before
    if isinstance(now, dict):
        return {key: value for key, value in now.items() if key not in before or before[key] is not value}
    return now[len(before) :]


def _add(found: Any, contents: Any) -> None:
    if isinstance(found, list):
        found.extend(contents)
    else:
        found.update(contents)
