"""The loader that SGLang gets instead of its own when the cache was asked for."""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.model_loader.loader import BaseModelLoader
from torch import nn

from torchwcache.attachment import Attachment
from torchwcache.engine import EngineOptions, OneRank, ProcessGroupRanks, RankGroup, RankStart
from torchwcache.engine_memory import OwnMemory, make_free, wanted_nbytes
from torchwcache_sglang import leases
from torchwcache_sglang.adapter import SGLangAdapter, model_config_for
from torchwcache_sglang.memory import agreed_nbytes, baseline_nbytes, free_nbytes, held_nbytes, static_fraction

__all__ = ["CacheLoader", "ranks_of"]

logger = logging.getLogger("sglang.torchwcache")

_SLOWEST_RANK_S = 900.0


class CacheLoader(BaseModelLoader):  # type: ignore[misc]
    """Attaches the model, or has SGLang's own loader load it and publishes what that made.

    Args:
        inner: SGLang's own loader, without our options.
        options: What was asked for.
    """

    preloaded_weights_bytes = 0
    """What SGLang adds to its baseline, in bytes, since 0.5.19."""
    baseline_nbytes = 0
    """What is to be added to it; may be negative. See ``torchwcache_sglang.memory``."""

    def __init__(self, inner: Any, options: EngineOptions) -> None:
        super().__init__(inner.load_config)
        self.inner, self.options = inner, options
        self.attachment: Attachment | None = None

    def download_model(self, model_config: Any) -> None:
        """As SGLang's own loader does."""
        self.inner.download_model(model_config)

    def load_model(self, *, model_config: Any, device_config: Any) -> nn.Module:
        """In every rank: all attach, or all load."""
        device = _device_name(device_config)
        cfg = model_config_for(model_config, device, options=self.options)
        group = ranks_of(self.options.timeout_s, draft=cfg.role.value == "draft")
        adapter = SGLangAdapter(self.inner, model_config, device_config)
        own = OwnMemory(cfg.device)
        free = free_nbytes(cfg.device)
        start = RankStart(cfg, adapter, self.options, group, say=logger.info)
        start.decide()
        fraction = static_fraction()
        if fraction is not None and torch.device(cfg.device).type == "cuda":
            mapped, needed = (start.attachment.memory_nbytes, 0) if start.attachment is not None else (0, start.needed_nbytes())
            wanted = wanted_nbytes(cfg.device, fraction, mapped=mapped + held_nbytes(cfg.device), needed=needed)
            make_free(start.free_up, cfg.device, wanted)
        attachment = self.attachment = start.finish()
        leases.remember(shared=start.shared, nbytes=attachment.memory_nbytes)
        added = baseline_nbytes(attachment, own.nbytes("reserved"), fraction, start.evicted_nbytes)
        self.baseline_nbytes = agreed_nbytes(group, free, added)
        self.preloaded_weights_bytes = max(0, self.baseline_nbytes)
        return attachment.model


def _device_name(device_config: Any) -> str:
    kind, index = str(device_config.device_type), device_config.gpu_id
    return kind if kind == "cpu" or index is None or index < 0 else f"{kind}:{index}"


def ranks_of(timeout_s: float, *, draft: bool) -> RankGroup:
    """The ranks that load this model together: all of them; for a draft, which only one pipeline stage has, those of its stage.

    Args:
        timeout_s: How long a rank may wait for another engine that produces its shard, in seconds.
        draft: Whether it is a draft.
    """
    from sglang.srt.distributed import parallel_state

    get = parallel_state.get_tp_group if draft else parallel_state.get_world_group
    group = get().cpu_group
    return OneRank() if group.size() == 1 else ProcessGroupRanks(group, timeout_s=timeout_s + _SLOWEST_RANK_S)
