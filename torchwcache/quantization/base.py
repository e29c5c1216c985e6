"""What a quantization method must tell the gate. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

__all__ = ["QuantizationMethod"]


class QuantizationMethod(Protocol):
    """One method whose finished state is known to be captured completely. Found through ``torchwcache.quantization``.

    A method may also have a true attribute ``quantizes``: weights that are not quantized yet can be at load, when the user asks for
    the method by name.
    """

    name: str
    version: str
    evidence: str
    """What shows that this method may be cached: the id of a parity run, or the tests that compare it with a load from disk."""

    def accepts(self, quantization_config: Mapping[str, Any] | None) -> bool:
        """Whether this is the method that a checkpoint's config states (``None``: it states none)."""

    def check_tensors(self, module: nn.Module, quantization_config: Mapping[str, Any] | None = None) -> None:
        """Look at the real tensors of a loaded module.

        Args:
            module: As loaded.
            quantization_config: What the checkpoint's config states: the tensors must not contradict it.

        Raises:
            UnsupportedQuantizationError: They are not what this method makes; names the module or tensor.
        """
