"""What a loader is: reads a checkpoint into a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchwcache.identity.checkpoint import CheckpointFiles

__all__ = ["Loader"]


class Loader(Protocol):
    """One way to read checkpoints. Found through the entry-point group ``torchwcache.loaders``."""

    name: str
    version: str

    def files(self, cfg: ModelConfig) -> CheckpointFiles:
        """The files that :meth:`load` will open: weights, index, config, remote code.

        Raises:
            CheckpointError: Something is missing or malformed.
        """

    def quantization_config(self, cfg: ModelConfig) -> Mapping[str, Any] | None:
        """The quantization as the checkpoint's config states it, or ``None``."""

    def load(self, cfg: ModelConfig, context: LoadContext) -> LoadResult:
        """Build the module and fill it."""
