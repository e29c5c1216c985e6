"""What a quantization method must tell the gate. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

__all__ = ["QuantizationMethod"]


class QuantizationMethod(Protocol):
    """One method whose finished state is known to be captured completely. Found through ``torchwcache.quantization``."""

    name: str
    version: str
    evidence: str
    """What shows that this method may be cached: the tests that compare it with a load from disk, on which models."""

    def accepts(self, quantization_config: Mapping[str, Any] | None) -> bool:
        """Whether this is the method that a checkpoint's config states (``None``: it states none)."""

    def check_tensors(self, module: nn.Module) -> None:
        """Look at the real tensors of a loaded module.

        Raises:
            UnsupportedQuantizationError: They are not what this method makes; names the module or tensor.
        """
