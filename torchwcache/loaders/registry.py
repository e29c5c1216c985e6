"""All loaders, found through the entry-point group ``torchwcache.loaders``."""

from __future__ import annotations

from torchwcache.loaders.base import Loader
from torchwcache.plugins import Registry

__all__ = ["LOADERS"]

LOADERS: Registry[Loader] = Registry("torchwcache.loaders")
"""All loaders."""
