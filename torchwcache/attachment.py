"""What a process holds while it uses a model from the cache: the module, its lease, and a report of how it came about."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from torchwcache.errors import AttachmentError, DetachedError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchwcache.identity.fingerprint import FieldDifference
    from torchwcache.manifest import Manifest
    from torchwcache.memory.base import MappedSegment
    from torchwcache.wire.client import DaemonConnection

__all__ = ["AttachReport", "Attachment", "Phase"]

Phase = Literal["device", "fingerprint", "connect", "wait", "load", "capture", "publish", "map", "build", "rebind"]


@dataclass(slots=True, kw_only=True)
class AttachReport:
    """How an attach went. Everything that did not go as hoped is named in ``warnings``.

    Attributes:
        source: ``cache`` (a hit), ``waited`` (another process was producing it), or ``disk``.
        published: Whether this process published what it loaded.
        sealed: Whether the weights lie in memory that nobody may write any more, though nobody may ever have heard of it: a publish
            that failed at its very end.
        seconds: Wall time by phase; phases that did not happen are missing.
        mapped_nbytes: Bytes shared with every other process.
        copied_nbytes: Bytes of private copies (buffers that the module may write).
        tensors: Number of tensor objects.
        same_addresses: Whether the weights lie at the producer's own addresses (GPU memory; ``None`` where that means nothing).
        fingerprint: 32 hex digits; empty in mode ``off``.
        slot: What an operator would call the model.
        differences: For a mismatch: the fields in which the cached entry of the slot differs, with both values.
        warnings: Every fallback and every restriction, in words.
    """

    source: Literal["cache", "waited", "disk"] = "disk"
    published: bool = False
    sealed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    mapped_nbytes: int = 0
    copied_nbytes: int = 0
    tensors: int = 0
    same_addresses: bool | None = None
    fingerprint: str = ""
    slot: str = ""
    differences: tuple[FieldDifference, ...] = ()
    warnings: tuple[str, ...] = ()

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Add the time spent inside to a phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total_s(self) -> float:
        """Seconds of all phases together."""
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "source": self.source,
            "published": self.published,
            "seconds": dict(self.seconds),
            "total_s": self.total_s,
            "mapped_nbytes": self.mapped_nbytes,
            "copied_nbytes": self.copied_nbytes,
            "tensors": self.tensors,
            "same_addresses": self.same_addresses,
            "fingerprint": self.fingerprint,
            "slot": self.slot,
            "differences": [{"path": d.path, "wanted": d.wanted, "cached": d.cached} for d in self.differences],
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.seconds.items())
        lines = [
            f"from {self.source}{' (published)' if self.published else ''} in {self.total_s * 1e3:.1f} ms: {phases}",
            f"{self.mapped_nbytes} bytes mapped, {self.copied_nbytes} bytes copied, {self.tensors} tensors",
        ]
        lines += [f"differs from the cached entry: {difference}" for difference in self.differences]
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


class Attachment:
    """A model in use. A context manager that gives the module; or use :attr:`model` and :meth:`close`.

    Leaving it ends the lease and takes the module's tensors away: using the module afterwards raises ``DetachedError``. Tensors
    that were kept elsewhere stay valid; the memory is unmapped when the last of them dies.
    """

    def __init__(
        self,
        model: nn.Module,
        report: AttachReport,
        *,
        connection: DaemonConnection | None = None,
        manifest: Manifest | None = None,
        segments: Sequence[MappedSegment] = (),
        plain: Sequence[weakref.ref[torch.Tensor]] | None = None,
    ) -> None:
        from torchwcache.module.detach import outside_tables

        self._model: nn.Module | None = model
        self._report = report
        self._manifest = manifest
        self._segments = list(segments)
        # What else than parameters and buffers is to be taken away again; what the user puts into the module later is the user's.
        self._plain = outside_tables(model) if plain is None else plain
        self._entered = False
        # `model = WeightCache.attach(cfg).model` keeps no attachment: the lease then lasts as long as the model does.
        self._lease = weakref.finalize(model, connection.close) if connection is not None else None

    @property
    def model(self) -> nn.Module:
        """The module.

        Raises:
            DetachedError: The attachment was closed.
        """
        if self._model is None:
            raise DetachedError("this attachment was closed; attach again to get a model")
        return self._model

    @property
    def report(self) -> AttachReport:
        """How the attach went."""
        return self._report

    @property
    def memory_nbytes(self) -> int:
        """Bytes of shared memory that the published weights lie in, there once however many map them; 0 where nothing is shared."""
        return 0 if self._manifest is None else sum(self._manifest.segments)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._model is None

    def verify(self) -> tuple[str, ...]:
        """Names of tensors whose published bytes were changed through this process's mapping (its own copy only)."""
        if self._manifest is None:
            return ()
        from torchwcache.module.modified import modified_tensors

        return modified_tensors(self.model, self._manifest, self._segments)

    def close(self) -> None:
        """End the lease and detach the module. Idempotent."""
        model, self._model = self._model, None
        if model is None:
            return
        from torchwcache.module.detach import detach

        try:
            detach(model, self._plain)
        finally:
            self._segments.clear()
            if self._lease is not None:
                self._lease()

    def __enter__(self) -> nn.Module:
        if self._entered:
            raise AttachmentError("an attachment can be entered once; attach again to get another")
        self._entered = True
        return self.model

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else type(self._model).__name__
        return f"<Attachment {state} {self._report.fingerprint}>"
