"""torchwcache: keep a finished model in memory that outlives every process, and attach it zero-copy.

    with WeightCache.attach(ModelConfig("checkpoint-dir")) as model:
        ...

Names are imported when they are first used: ``import torchwcache`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchwcache.attachment import Attachment, AttachReport
    from torchwcache.cache import WeightCache
    from torchwcache.config import Access, Identity, Mode, ModelConfig, Parallelism, Policy, Role
    from torchwcache.errors import (
        BuildError,
        CaptureError,
        CheckpointError,
        ConfigError,
        DaemonError,
        DaemonUnavailable,
        DetachedError,
        FingerprintError,
        MismatchError,
        RankError,
        RebindError,
        RefusedError,
        UnsupportedQuantizationError,
        WeightCacheError,
    )

__all__ = [
    "Access",
    "AttachReport",
    "Attachment",
    "BuildError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DaemonError",
    "DaemonUnavailable",
    "DetachedError",
    "FingerprintError",
    "Identity",
    "MismatchError",
    "Mode",
    "ModelConfig",
    "Parallelism",
    "Policy",
    "RankError",
    "RebindError",
    "RefusedError",
    "Role",
    "UnsupportedQuantizationError",
    "WeightCache",
    "WeightCacheError",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "torchwcache.attachment": ("AttachReport", "Attachment"),
    "torchwcache.cache": ("WeightCache",),
    "torchwcache.config": ("Access", "Identity", "Mode", "ModelConfig", "Parallelism", "Policy", "Role"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'torchwcache' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF.get(name, "torchwcache.errors")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
