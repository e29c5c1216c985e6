"""The choice of an adapter for a config."""

from __future__ import annotations

from torchwcache.adapter import Adapter
from torchwcache.config import ModelConfig
from torchwcache.errors import PluginError
from torchwcache.plugins import ADAPTERS

__all__ = ["adapter_for"]


def adapter_for(cfg: ModelConfig) -> Adapter:
    """The adapter that a config names, or the one that accepts it.

    Raises:
        PluginError: There is none, or more than one.
    """
    if cfg.adapter is not None:
        return ADAPTERS.get(cfg.adapter)
    accepting = [name for name in ADAPTERS.names() if ADAPTERS.get(name).accepts(cfg)]
    if len(accepting) != 1:
        found = ", ".join(accepting) if accepting else "none"
        raise PluginError(
            f"{found} of the adapters ({', '.join(ADAPTERS.names())}) accepts checkpoint {cfg.checkpoint!r}; name one with "
            "ModelConfig(adapter=...)"
        )
    return ADAPTERS.get(accepting[0])
