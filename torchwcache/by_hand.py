"""The pieces of the public interface that a caller drives by hand: publish a model, verify an entry."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from torchwcache.adapter import CaptureRules, LoadResult
from torchwcache.adapters import adapter_for
from torchwcache.attaching import Attaching, AttachOptions, attach_through_daemon
from torchwcache.attachment import Attachment
from torchwcache.config import ModelConfig, Policy, policies_from
from torchwcache.errors import ConfigError
from torchwcache.memory.select import memory_for
from torchwcache.module.normal_tensors import normal_tensors
from torchwcache.module.pack import SegmentWriter
from torchwcache.production import (
    capture_module,
    check_publishable,
    load_unpublished,
    make_room,
    publish_module,
)
from torchwcache.wire.messages import Hit

if TYPE_CHECKING:
    from torch import nn

    from torchwcache.cache import DaemonCache
    from torchwcache.memory.base import Memory
    from torchwcache.module.capture import Captured
    from torchwcache.module.parity import ParityReport

__all__ = ["publish_by_hand", "verify_against_disk"]


def publish_by_hand(cfg: ModelConfig, model: nn.Module, options: AttachOptions) -> Attachment:
    """``WeightCache.publish``: a model that the caller made, under a variant of its own."""
    with normal_tensors():
        return _publish(Attaching(cfg, options), cfg, model, options)


def _publish(attaching: Attaching, cfg: ModelConfig, model: nn.Module, options: AttachOptions) -> Attachment:
    attaching.describe(scratch=True)
    report = attaching.report
    with attaching.identity:
        with report.phase("fingerprint"):
            fingerprint = attaching.fingerprint(attaching.identity.remembered() or attaching.identity.compute())
            report.fingerprint = fingerprint.hex
        try:
            reply, fds = attaching.ask(fingerprint, provisional=False)
            if isinstance(reply, Hit):
                _raise_taken(options.variant, fds)
            check_publishable(cfg, LoadResult(module=model), attaching.method, attaching.description.quantization_config)
            with report.phase("capture"):
                captured = capture_module(
                    cfg, attaching.adapter, model, attaching.built, attaching.construction, attaching.memory, None
                )
            assert attaching.connection is not None
            make_room(attaching.connection, attaching.memory, _needed_nbytes(captured, attaching.memory))
            with SegmentWriter(attaching.memory) as writer:
                published = publish_module(
                    captured,
                    writer,
                    attaching.connection,
                    fingerprint,
                    ticket=0,
                    slot=attaching.slot,
                    description=attaching.description,
                    report=report,
                )
            if published.hit is not None:
                _raise_taken(options.variant, published.fds)
        except BaseException:
            attaching.close_connection()
            raise
    return Attachment(model, report, connection=attaching.connection, manifest=published.manifest, segments=published.segments)


def _needed_nbytes(captured: Captured, memory: Memory) -> int:
    """The model is there already, and its memory is freed as it is packed, but for what it keeps to itself."""
    private = sum(group.nbytes for group, shared in zip(captured.storages, captured.shared, strict=True) if not shared)
    return private + memory.segment_nbytes(captured.nbytes)


def _raise_taken(variant: str | None, fds: Sequence[int]) -> NoReturn:
    for fd in fds:
        os.close(fd)
    raise ConfigError(
        f"variant {variant!r} of this model is published already, perhaps with other weights; evict it first, or choose another "
        "name"
    )


def verify_against_disk(cfg: ModelConfig, cache: DaemonCache) -> ParityReport:
    """Attach what is cached, load afresh, compare. Produces nothing."""
    from torchwcache.module.parity import compare_modules

    adapter = adapter_for(cfg)
    options = AttachOptions(
        socket=cache.socket, start=False, policies=policies_from(fallback=Policy.ERROR, environ={}), produce=False
    )
    with attach_through_daemon(cfg, options) as attached:
        fresh = load_unpublished(cfg, adapter, memory_for(cfg.device)).module
        adapter.prepare(cfg, fresh)
        rules = adapter.rules(cfg, fresh)
        return compare_modules(fresh, attached, rules=CaptureRules(ignore={**rules.ignore, **cfg.ignore}))
