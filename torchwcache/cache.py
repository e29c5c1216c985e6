"""The public face: ``WeightCache``, and its two implementations, through a daemon and without one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from torchwcache.attachment import Attachment, AttachReport
from torchwcache.config import Access, Mode, ModelConfig, Policies, Policy, access_from, mode_from, policies_from, timeout_from
from torchwcache.errors import ConfigError, DaemonUnavailable

if TYPE_CHECKING:
    from torch import nn

    from torchwcache.module.parity import ParityReport
    from torchwcache.wire.client import DaemonConnection
    from torchwcache.wire.messages import EntryInfo, Evicted

__all__ = ["DaemonCache", "DiskCache", "WeightCache"]

DEFAULT_TIMEOUT_S = 600.0
"""How long an attach waits for another producer, by default."""
CONNECT_TIMEOUT_S = 10.0
"""How long the daemon has to answer anything but a wait."""

_T = TypeVar("_T")


class WeightCache(Protocol):
    """A cache of finished models.

    ``WeightCache.attach(cfg)`` does everything at once; ``WeightCache.connect()`` gives the pieces, bound to one daemon.
    """

    @staticmethod
    def attach(
        cfg: ModelConfig,
        *,
        mode: Mode | str | None = None,
        socket: str | None = None,
        variant: str | None = None,
        on_mismatch: Policy | str | None = None,
        on_unavailable: Policy | str | None = None,
        on_refused: Policy | str | None = None,
        fallback: Policy | str | None = None,
        access: Access | str = Access.COPY_ON_WRITE,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        requires_grad: bool = False,
    ) -> Attachment:
        """Get a finished model: from the cache, or from disk and then into the cache.

        Args:
            cfg: The model.
            mode: ``off``, ``client`` or ``daemon`` (default); ``TORCHWCACHE_MODE`` overrides it.
            socket: The daemon's socket; ``TORCHWCACHE_SOCKET``, or one fixed place for each user, when ``None``.
            variant: Name of something published by hand (:meth:`publish`).
            on_mismatch: What to do when the slot holds an entry under another fingerprint: ``load`` (default) or ``error``.
            on_unavailable: What to do when no daemon can be reached or used, or memory is short: ``load`` (default) or ``error``.
            on_refused: What to do when this model cannot be cached: ``error`` (default) or ``load``.
            fallback: Sets all three policies; ``TORCHWCACHE_FALLBACK`` overrides.
            access: What this process's own write to a shared weight does: ``copy-on-write`` or ``readonly``.
            timeout_s: Seconds to wait, at most, while another process produces the entry.
            requires_grad: Give parameters the ``requires_grad`` they were published with. By default none requires grad.

        Returns:
            An :class:`Attachment`: ``with`` it, or use its ``model`` and ``close()``.

        Raises:
            WeightCacheError: One of ``torchwcache.errors``; each says what happened and what to do.
        """
        cache = WeightCache.connect(socket=socket, mode=mode)
        return cache.attach(
            cfg,
            variant=variant,
            on_mismatch=on_mismatch,
            on_unavailable=on_unavailable,
            on_refused=on_refused,
            fallback=fallback,
            access=access,
            timeout_s=timeout_s,
            requires_grad=requires_grad,
        )

    @staticmethod
    def connect(*, socket: str | None = None, mode: Mode | str | None = None) -> WeightCache:
        """A cache bound to one daemon, or in mode ``off`` to none. Reaches for the daemon when it is first needed."""
        chosen = mode_from(mode)
        if chosen is Mode.OFF:
            return DiskCache()
        return DaemonCache(socket, start=chosen is Mode.DAEMON)

    def publish(self, cfg: ModelConfig, model: nn.Module, *, variant: str) -> Attachment:
        """Publish a model that the caller made or changed; see :meth:`DaemonCache.publish`."""
        ...

    def entries(self) -> tuple[EntryInfo, ...]:
        """What is cached, oldest first."""
        ...

    def evict(
        self, key: str | None = None, *, slot: str | None = None, everything: bool = False, refusals: bool = False
    ) -> Evicted:
        """Free entries; leased ones when their last lease ends."""
        ...

    def verify(self, cfg: ModelConfig, *, variant: str | None = None) -> ParityReport:
        """Compare what an attach gives with a fresh load from disk."""
        ...


class DiskCache(WeightCache):
    """Mode ``off``: everything is loaded from disk, and nothing is remembered."""

    def attach(  # type: ignore[override]
        self,
        cfg: ModelConfig,
        *,
        variant: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        requires_grad: bool = False,
        **_policies: object,
    ) -> Attachment:
        """Load from disk."""
        from torchwcache.production import attach_from_disk

        if variant is not None:
            raise ConfigError(f"variant={variant!r} names something that was published, and mode is off")
        return attach_from_disk(cfg, AttachReport(), requires_grad=requires_grad)

    def publish(self, cfg: ModelConfig, model: nn.Module, *, variant: str) -> Attachment:
        """Refuse: there is nowhere to publish to."""
        raise DaemonUnavailable("mode is off: there is no cache to publish to")

    def entries(self) -> tuple[EntryInfo, ...]:
        """Nothing."""
        return ()

    def evict(
        self, key: str | None = None, *, slot: str | None = None, everything: bool = False, refusals: bool = False
    ) -> Evicted:
        """Nothing to evict."""
        from torchwcache.wire.messages import Evicted

        return Evicted(freed=(), pending=(), nbytes=0)

    def verify(self, cfg: ModelConfig, *, variant: str | None = None) -> ParityReport:
        """Refuse: there is nothing to verify."""
        raise DaemonUnavailable("mode is off: there is no cache to verify")


class DaemonCache(WeightCache):
    """A cache behind a daemon.

    Args:
        socket: The daemon's socket; the user's own when ``None``.
        start: Start a daemon when none runs.
    """

    def __init__(self, socket: str | None = None, *, start: bool = True) -> None:
        from torchwcache.daemon.supervisor import default_socket_path

        self.socket = socket if socket is not None else default_socket_path(os.environ)
        self.start = start

    def attach(  # type: ignore[override]
        self,
        cfg: ModelConfig,
        *,
        variant: str | None = None,
        on_mismatch: Policy | str | None = None,
        on_unavailable: Policy | str | None = None,
        on_refused: Policy | str | None = None,
        fallback: Policy | str | None = None,
        access: Access | str = Access.COPY_ON_WRITE,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        requires_grad: bool = False,
    ) -> Attachment:
        """As :meth:`WeightCache.attach`, with this daemon."""
        from torchwcache.attaching import AttachOptions, attach_through_daemon

        options = AttachOptions(
            socket=self.socket,
            start=self.start,
            policies=policies_from(
                on_mismatch=on_mismatch, on_unavailable=on_unavailable, on_refused=on_refused, fallback=fallback
            ),
            access=access_from(access),
            timeout_s=timeout_from(timeout_s),
            requires_grad=requires_grad,
            variant=variant,
        )
        return attach_through_daemon(cfg, options)

    def publish(self, cfg: ModelConfig, model: nn.Module, *, variant: str) -> Attachment:
        """Publish a model that the caller made or changed.

        Its fingerprint contains ``variant``, which an attach must repeat: nobody can put other bytes under a checkpoint's own
        fingerprint. The model goes on working, on the published bytes, for as long as the returned attachment is open.

        Args:
            cfg: What the model was made from: an attach with an equal config builds the same module.
            model: Changed in place: same tensor objects, published memory.
            variant: A name of your own, such as ``"merged-lora-7"``.

        Raises:
            CaptureError: The model holds what cannot be carried.
            UnsupportedQuantizationError: The model's tensors are not on the allow-list.
        """
        from torchwcache.attaching import AttachOptions
        from torchwcache.by_hand import publish_by_hand

        if not variant:
            raise ConfigError("publish needs a variant: a name that attach must repeat")
        options = AttachOptions(socket=self.socket, start=self.start, policies=Policies(), variant=variant)
        return publish_by_hand(cfg, model, options)

    def entries(self) -> tuple[EntryInfo, ...]:
        """What is cached, oldest first."""
        return self._ask(lambda connection: connection.entries())

    def evict(
        self, key: str | None = None, *, slot: str | None = None, everything: bool = False, refusals: bool = False
    ) -> Evicted:
        """Free entries by key, by slot, or all; leased ones when their last lease ends.

        Args:
            key: A fingerprint, 32 hex digits.
            slot: As ``entries()`` shows it.
            everything: All of them.
            refusals: Forget remembered refusals, too.

        Raises:
            EntryNotFoundError: There is no such entry.
        """
        return self._ask(lambda connection: connection.evict(key=key, slot=slot, everything=everything, refusals=refusals))

    def verify(self, cfg: ModelConfig, *, variant: str | None = None) -> ParityReport:
        """Load ``cfg`` afresh from disk, attach it, and compare the two bit for bit.

        Raises:
            ConfigError: A ``variant`` was given: what was published by hand has no disk to be compared with.
        """
        from torchwcache.by_hand import verify_against_disk

        if variant is not None:
            raise ConfigError("a variant was published by hand: there is nothing on disk to compare it with")
        return verify_against_disk(cfg, self)

    def _ask(self, request: Callable[[DaemonConnection], _T]) -> _T:
        from torchwcache.daemon.supervisor import connect_or_start

        with connect_or_start(self.socket, start=self.start, timeout_s=CONNECT_TIMEOUT_S) as connection:
            return request(connection)
