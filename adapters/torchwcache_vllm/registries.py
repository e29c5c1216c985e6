"""What building a vLLM model leaves outside the module: names of layers, shared rotary embeddings, counters (design D11).

vLLM finds attention and MoE layers by name through the compilation config, and gives every layer with the same rotary settings one
module. A second build in the same process would meet "Duplicate layer name", or get a rotary module that the first one owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["Registered", "Registries"]

_OF_COMPILATION = ("static_forward_context", "static_all_moe_layers", "enabled_custom_ops", "disabled_custom_ops")


class Registered:
    """The contents of every registry at one moment."""

    def __init__(self, contents: dict[str, Any]) -> None:
        self.contents = contents


class Registries:
    """The registries that builds under one ``VllmConfig`` fill. They are changed in place: others hold them too.

    Args:
        vllm_config: The live configuration.
    """

    def __init__(self, vllm_config: Any) -> None:
        from vllm.model_executor.layers import rotary_embedding

        self._live: dict[str, Any] = {}
        for name in _OF_COMPILATION:
            found = getattr(vllm_config.compilation_config, name, None)
            if found is not None:
                self._live[name] = found
        self._live["rotary"] = rotary_embedding._ROPE_DICT

    def now(self) -> Registered:
        """Shallow copies of everything."""
        return Registered({name: found.copy() for name, found in self._live.items()})

    def put(self, registered: Registered) -> None:
        """Make the registries hold exactly this."""
        for name, found in self._live.items():
            contents = registered.contents[name]
            found.clear()
            if isinstance(found, list):
                found.extend(contents)
            else:
                found.update(contents)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Build something that is not (yet) the engine's model: without rotary modules of others, and without leaving a trace."""
        before = self.now()
        self._live["rotary"].clear()
        try:
            yield
        finally:
            self.put(before)
