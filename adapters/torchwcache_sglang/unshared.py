"""A model that is not cached although the cache was asked for: what nobody uses makes room for it all the same."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from torchwcache.engine_memory import make_free, wanted_nbytes
from torchwcache.memory.select import memory_for
from torchwcache.production import free_up
from torchwcache_sglang.context import option
from torchwcache_sglang.memory import agreed_nbytes, free_nbytes, held_nbytes, static_fraction

if TYPE_CHECKING:
    from torchwcache.engine import EngineOptions

__all__ = ["account_room", "make_room"]

_ROOM = "_torchwcache_room"
"""Set on SGLang's own loader: how long ranks wait for each other, what was free before, and by how much more is free, in bytes."""


def make_room(loader: Any, model_config: Any, options: EngineOptions) -> None:
    """Evict what nobody uses until as much is free as SGLang is told to use, if that can be had so; before it loads.

    Args:
        loader: SGLang's own.
        model_config: SGLang's ``ModelConfig``. A draft's share was its target's to ask for.
        options: What was asked for.
    """
    fraction = static_fraction()
    if model_config is None or getattr(model_config, "is_draft_model", False) or fraction is None:
        return
    if option("device", "cuda") != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return
    memory = memory_for("cuda")
    device = str(memory.device)
    free = free_nbytes(device)
    evict = functools.partial(free_up, options.socket, memory)
    freed = make_free(evict, device, wanted_nbytes(device, fraction, mapped=held_nbytes(device)))
    setattr(loader, _ROOM, (options.timeout_s, free, freed))


def account_room(runner: Any) -> None:
    """After the load: add that to SGLang's baseline, which was measured before. All ranks must call it."""
    room = getattr(getattr(runner, "loader", None), _ROOM, None)
    if room is None or not hasattr(runner, "pre_model_load_memory"):
        return
    from torchwcache_sglang.loader import ranks_of

    timeout_s, free, freed = room
    runner.pre_model_load_memory += agreed_nbytes(ranks_of(timeout_s, draft=False), free, freed) / (1 << 30)
