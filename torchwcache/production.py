"""The producer's side of an attach: load by the engine's own pipeline, check the gate, capture, pack, commit in one message."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parameter import is_lazy

from torchwcache.adapter import Adapter, Description, LoadContext, LoadResult
from torchwcache.adapters import adapter_for
from torchwcache.attachment import Attachment, AttachReport
from torchwcache.config import Access, ModelConfig
from torchwcache.errors import (
    CaptureError,
    DaemonError,
    NotAFunctionOfCheckpointError,
    SegmentError,
    SegmentMemoryError,
    UnsupportedQuantizationError,
    WeightCacheError,
)
from torchwcache.identity.fingerprint import Fingerprint
from torchwcache.manifest import Manifest, encode_manifest
from torchwcache.memory.base import MappedSegment, Memory
from torchwcache.memory.select import memory_for
from torchwcache.module.capture import Captured, capture
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.one_at_a_time import one_at_a_time
from torchwcache.module.pack import SegmentWriter, pack
from torchwcache.module.tree import Tree
from torchwcache.quantization.registry import check_tensors
from torchwcache.wire.client import DaemonConnection
from torchwcache.wire.messages import Commit, Hit

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "REFUSALS",
    "UNUSABLE",
    "Heartbeat",
    "Published",
    "attach_from_disk",
    "capture_module",
    "check_publishable",
    "finish",
    "free_up",
    "load_unpublished",
    "make_room",
    "module_nbytes",
    "needed_nbytes",
    "publish_module",
    "refusal_kind",
    "serve_unpublished",
    "wait_until_free",
]

logger = logging.getLogger(__name__)

REFUSALS = (UnsupportedQuantizationError, CaptureError, NotAFunctionOfCheckpointError)
"""What makes a model impossible to cache, as opposed to impossible to load."""

UNUSABLE = (DaemonError, SegmentError)
"""What makes the cache, as opposed to the model, unusable."""

_HEARTBEAT_S = 5.0
_FREED_WITHIN_S = 5.0


def refusal_kind(error: Exception) -> str:
    """The kind of a refusal as the daemon remembers it: the name of the error."""
    return type(error).__name__


def load_unpublished(cfg: ModelConfig, adapter: Adapter, memory: Memory, *, publishes: bool = False) -> LoadResult:
    """Load into ordinary memory: as if there were no cache, unless what comes out is going to be published."""
    device = memory.device

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    context = LoadContext(
        allocate=allocate,
        expect=lambda sizes: None,
        read_file=memory.read_file,
        progress=lambda done, total: None,
        publishes=publishes,
    )
    with one_at_a_time():
        return adapter.load(cfg, context)


def attach_from_disk(cfg: ModelConfig, report: AttachReport, *, requires_grad: bool, adapter: Adapter | None = None) -> Attachment:
    """Load into ordinary memory: mode ``off``, and every fallback."""
    adapter = adapter if adapter is not None else adapter_for(cfg)
    with report.phase("load"):
        result = load_unpublished(cfg, adapter, memory_for(cfg.device))
    return serve_unpublished(cfg, adapter, result, report, requires_grad)


def serve_unpublished(
    cfg: ModelConfig, adapter: Adapter, result: LoadResult, report: AttachReport, requires_grad: bool
) -> Attachment:
    """Hand out a module that nobody else gets."""
    report.source = "disk"
    report.warnings += tuple(result.notes)
    finish(cfg, adapter, result.module, requires_grad)
    report.tensors = len(list(result.module.parameters())) + len(list(result.module.buffers()))
    return Attachment(result.module, report)


def finish(cfg: ModelConfig, adapter: Adapter, module: nn.Module, requires_grad: bool) -> None:
    """What is done to every module before it is handed out, wherever it came from."""
    adapter.prepare(cfg, module)
    if not requires_grad:
        for parameter in module.parameters():
            parameter.requires_grad_(False)


class Heartbeat:
    """Tells the daemon that a producer is alive, and how far it is. Silence past the daemon's bound hands production on."""

    def __init__(self, connection: DaemonConnection, ticket: int, *, phase: str = "load") -> None:
        self._connection, self.ticket = connection, ticket
        self._phase, self._done, self._total = phase, 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchwcache-heartbeat", daemon=True)

    def update(self, done: int, total: int) -> None:
        """Bytes done, and bytes in all."""
        self._done, self._total = done, total

    def phase(self, name: str) -> None:
        """Say at once that another phase began."""
        self._phase, self._done, self._total = name, 0, 0
        self._send()

    def _send(self) -> bool:
        try:
            self._connection.progress(self.ticket, phase=self._phase, done=self._done, total=self._total)
        except (DaemonError, OSError) as error:
            logger.debug("the daemon did not take a progress message: %s", error)
            return False
        return True

    def _run(self) -> None:
        while not self._stop.wait(_HEARTBEAT_S) and self._send():
            pass

    def __enter__(self) -> Heartbeat:
        self._send()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def make_room(connection: DaemonConnection, memory: Memory, nbytes: int) -> int:
    """See to it that ``nbytes`` can be allocated, evicting unleased entries where that helps.

    Returns:
        Bytes of what was evicted.

    Raises:
        SegmentMemoryError: There is not enough memory, whatever is evicted.
    """
    available = memory.available_nbytes()
    if available >= nbytes:
        return 0
    evicted, available = _evict(connection, memory, nbytes, available, memory.available_nbytes)
    if available < nbytes:
        raise SegmentMemoryError(
            f"{nbytes} bytes are needed to publish and {available} are available on {memory.device_id}; nothing was published",
            nbytes=nbytes,
            available=available,
        )
    return evicted


def free_up(socket: str, memory: Memory, nbytes: int, free: Callable[[], int] | None = None) -> int:
    """Evict unleased entries until ``nbytes`` are free, if that is enough for it. For what is not published; never raises for it.

    Args:
        socket: The daemon's. None is started.
        memory: Where.
        nbytes: How many are wanted.
        free: How many are free, where somebody else's count matters; ``memory.available_nbytes`` otherwise.

    Returns:
        Bytes of what was evicted.
    """
    free = memory.available_nbytes if free is None else free
    if (available := free()) >= nbytes:
        return 0
    try:
        with DaemonConnection.connect(socket) as connection:
            entries = [entry for entry in connection.entries() if entry.device == memory.device_id]
            idle = sum(entry.nbytes for entry in entries if not entry.leases)
            if available + idle >= nbytes:
                return _evict(connection, memory, nbytes, available, free)[0]
            if idle:
                logger.warning(
                    "%d bytes are wanted on %s and %d are free; evicting what nobody uses there (%d bytes) would not be enough, "
                    "and nothing was evicted. See `torchwcache status`", nbytes, memory.device_id, available, idle,
                )  # fmt: skip
    except (WeightCacheError, OSError) as error:
        logger.debug("nothing was evicted: %s", error)
    return 0


def _evict(connection: DaemonConnection, memory: Memory, nbytes: int, available: int, free: Callable[[], int]) -> tuple[int, int]:
    """Bytes of what was evicted, and how many are free then."""
    evicted = connection.make_room(memory.device_id, nbytes=nbytes - available)
    if evicted.freed:
        logger.info("evicted %d unleased entries (%d bytes) to make room", len(evicted.freed), evicted.nbytes)
    return evicted.nbytes, wait_until_free(free, nbytes, within_s=_FREED_WITHIN_S if evicted.freed else 0.0)


def wait_until_free(free: Callable[[], int], nbytes: int, *, within_s: float = _FREED_WITHIN_S) -> int:
    """How many bytes are free when ``nbytes`` are, or when the time is over: a GPU's driver gives memory back bit by bit, a little
    after the last descriptor was closed.
    """
    deadline = time.monotonic() + within_s
    while (available := free()) < nbytes and time.monotonic() < deadline:
        time.sleep(0.01)
    return available


def needed_nbytes(memory: Memory, weights_nbytes: int) -> int:
    """What a load and a publish take: the weights, and one segment beside them."""
    return weights_nbytes + memory.segment_nbytes(weights_nbytes)


def module_nbytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers, meta ones too: each tensor once, and nothing for those without a shape yet."""
    try:
        tables = [state[table] for state in Tree(module).states for table in ("_parameters", "_buffers")]
        tensors = [tensor for table in tables for tensor in table.values() if tensor is not None]
    except KeyError:  # TorchScript keeps them elsewhere
        tensors = [*module.parameters(), *module.buffers()]
    return sum(map(_nbytes, {id(tensor): tensor for tensor in tensors}.values()))


def _nbytes(tensor: torch.Tensor) -> int:
    try:
        return 0 if is_lazy(tensor) else tensor.nbytes
    except RuntimeError:  # sparse tensors have no size; what they are in is refused anyway
        return 0


@dataclass(frozen=True, slots=True)
class Published:
    """What a publish led to.

    ``hit`` is set, with its descriptors, when somebody else had published the same entry meanwhile: that one is to be used.
    """

    manifest: Manifest
    segments: list[MappedSegment]
    hit: Hit | None = None
    fds: tuple[int, ...] = ()


def check_publishable(
    cfg: ModelConfig, result: LoadResult, method: str, quantization_config: Mapping[str, Any] | None = None
) -> None:
    """What may not be published although it was loaded.

    Args:
        cfg: What was asked for.
        result: What was loaded.
        method: The quantization method that the gate found.
        quantization_config: What it found it by.

    Raises:
        NotAFunctionOfCheckpointError: Tensors were initialized anew and no seed was given, or were not written at all.
        UnsupportedQuantizationError: The module's tensors are not what the method says.
    """
    if result.unwritten:
        raise NotAFunctionOfCheckpointError(
            f"the load left {len(result.unwritten)} of the model's tensors without values, in whole or in part, since the "
            f"checkpoint does not hold them: {_some(result.unwritten)}. See whether a file of the checkpoint is missing",
            names=tuple(result.unwritten),
        )
    if result.initialized and cfg.seed is None:
        names = _some(result.initialized)
        raise NotAFunctionOfCheckpointError(
            f"{len(result.initialized)} tensors are not in the checkpoint and were initialized anew ({names}): another process "
            "would get other values. Give ModelConfig(seed=...) to make them part of the model's identity",
            names=tuple(result.initialized),
        )
    check_tensors(method, result.module, quantization_config)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")


def capture_module(
    cfg: ModelConfig,
    adapter: Adapter,
    module: nn.Module,
    built: nn.Module,
    construction: str,
    memory: Memory,
    classes: ClassSnapshot | None,
) -> Captured:
    """Capture under the rules of adapter and user."""
    rules = adapter.rules(cfg, module)
    rules = dataclasses.replace(rules, ignore={**rules.ignore, **cfg.ignore}, constants=(*rules.constants, *cfg.constants))
    return capture(module, built, device=memory.device, rules=rules, construction=construction, classes=classes)  # type: ignore[arg-type]


def publish_module(
    captured: Captured,
    writer: SegmentWriter,
    connection: DaemonConnection,
    fingerprint: Fingerprint,
    *,
    ticket: int,
    slot: str,
    description: Description,
    report: AttachReport,
    before_commit: Callable[[], None] = lambda: None,
    access: Access = Access.COPY_ON_WRITE,
) -> Published:
    """Pack, seal and commit a captured module, which goes on living on the published bytes.

    Args:
        captured: What to publish.
        writer: May hold storages already.
        connection: Holds the lease afterwards.
        fingerprint: The full one.
        ticket: The daemon's leave to produce; 0 for a publish by hand.
        slot: The entry's slot.
        description: Gives the label.
        report: Gets bytes and seconds.
        before_commit: Last checks, with everything sealed and nothing visible yet.
        access: What this process's own write to a shared weight does from then on.

    Raises:
        SegmentMemoryError: Memory ran out; the module still works and nothing was published.
    """
    memory = writer.memory
    with report.phase("publish"):
        placements = pack(captured, writer)
        report.sealed = True
        fds = [segment.seal() for segment in writer.segments]
        sizes = [segment.nbytes for segment in writer.segments]
        addresses = [segment.address for segment in writer.segments]
        manifest = captured.manifest(
            placements,
            sizes,
            fingerprint=fingerprint.hex,
            device_id=memory.device_id,
            memory=memory.kind,
            addresses=addresses if any(addresses) else (),
        )
        before_commit()
        request = Commit(
            ticket=ticket,
            key=fingerprint.hex,
            device=memory.device_id,
            slot=slot,
            family=fingerprint.family,
            fields=fingerprint.encode(),
            manifest=encode_manifest(manifest),
            memory=memory.kind,  # type: ignore[arg-type]
            segments=tuple(sizes),
            label=description.label,
        )
        reply, received = connection.commit(request, fds)
    if isinstance(reply, Hit):
        return Published(manifest, [], reply, tuple(received))
    report.published = True
    report.mapped_nbytes = sum(s.nbytes for s in manifest.storages if s.shared)
    report.copied_nbytes = sum(s.nbytes for s in manifest.storages if not s.shared)
    report.tensors = len(manifest.tensors)
    return Published(manifest, [segment.mapped(access=access) for segment in writer.segments])
