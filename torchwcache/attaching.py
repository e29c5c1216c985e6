"""One attach, from the config to a module: hit, wait, miss, mismatch, refusal, and what to do about each."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from torchwcache.adapter import Adapter, Description, LoadContext, LoadResult
from torchwcache.adapters import adapter_for
from torchwcache.attachment import Attachment, AttachReport
from torchwcache.config import Access, ModelConfig, Policies, Policy
from torchwcache.daemon.supervisor import connect_or_start
from torchwcache.errors import (
    ConfigError,
    DaemonError,
    EncodingError,
    ManifestError,
    MismatchError,
    RebindError,
    RefusedError,
    SegmentError,
    UnsupportedQuantizationError,
    WeightCacheError,
)
from torchwcache.identity.checkpoint import CheckpointIdentity, Content
from torchwcache.identity.environment import environment_stamp
from torchwcache.identity.fingerprint import Fingerprint, diff, fingerprint_of, slot_of
from torchwcache.manifest import Manifest, decode_manifest, validate
from torchwcache.memory.base import MappedSegment, Memory
from torchwcache.memory.select import memory_for
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.pack import SegmentWriter
from torchwcache.module.rebind import rebind
from torchwcache.production import (
    REFUSALS,
    Heartbeat,
    capture_module,
    check_publishable,
    load_unpublished,
    make_room,
    publish_module,
    refusal_kind,
)
from torchwcache.quantization.registry import check_config
from torchwcache.wire.messages import Attach, Hit, Miss, OtherEntry, Produce, Refused, Waiting

if TYPE_CHECKING:
    from torch import nn

    from torchwcache.cache import DaemonCache
    from torchwcache.module.parity import ParityReport
    from torchwcache.wire.client import DaemonConnection

__all__ = ["AttachOptions", "attach_from_disk", "attach_through_daemon", "publish_by_hand", "verify_against_disk"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_UNUSABLE = (DaemonError, SegmentError)
"""What makes the cache, as opposed to the model, unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """Everything about an attach that is not the model; see ``WeightCache.attach``."""

    socket: str
    start: bool
    policies: Policies
    access: Access = Access.COPY_ON_WRITE
    timeout_s: float = 600.0
    requires_grad: bool = False
    variant: str | None = None


def attach_from_disk(cfg: ModelConfig, report: AttachReport, *, requires_grad: bool) -> Attachment:
    """Load into ordinary memory: mode ``off``, and every fallback."""
    adapter = adapter_for(cfg)
    with report.phase("load"):
        result = load_unpublished(cfg, adapter, memory_for(cfg.device))
    return _serve_unpublished(cfg, adapter, result, report, requires_grad)


def _serve_unpublished(
    cfg: ModelConfig, adapter: Adapter, result: LoadResult, report: AttachReport, requires_grad: bool
) -> Attachment:
    report.source = "disk"
    report.warnings += tuple(result.notes)
    _finish(cfg, adapter, result.module, requires_grad)
    report.tensors = len(list(result.module.parameters())) + len(list(result.module.buffers()))
    return Attachment(result.module, report)


def _finish(cfg: ModelConfig, adapter: Adapter, module: nn.Module, requires_grad: bool) -> None:
    adapter.prepare(cfg, module)
    if not requires_grad:
        for parameter in module.parameters():
            parameter.requires_grad_(False)


def attach_through_daemon(cfg: ModelConfig, options: AttachOptions) -> Attachment:
    """The whole of ``WeightCache.attach`` in the modes ``client`` and ``daemon``."""
    return _Attaching(cfg, options).run()


class _Attaching:
    """The state of one attach."""

    def __init__(self, cfg: ModelConfig, options: AttachOptions) -> None:
        self.cfg, self.options, self.policies = cfg, options, options.policies
        self.adapter: Adapter = adapter_for(cfg)
        self.memory: Memory = memory_for(cfg.device)
        self.report = AttachReport()
        self.built: nn.Module
        self.construction: str
        self.description: Description
        self.identity: CheckpointIdentity
        self.method: str
        self.connection: DaemonConnection | None = None

    # ---- what is asked for ---------------------------------------------------------------------------------------------------

    def describe(self, module: nn.Module | None = None) -> None:
        """Build on meta, describe, gate by config, and stat the files. Reads no weights."""
        with self.report.phase("build"):
            self.built, self.construction = self.adapter.build(self.cfg)
        with self.report.phase("fingerprint"):
            self.description = self.adapter.describe(self.cfg, self.built)
            self.method = check_config(self.description.quantization_config, self.cfg.quantization)
            self.identity = CheckpointIdentity(self.description.checkpoint, mode=self.cfg.identity)
            self.slot = slot_of(self.cfg, self.description, self.memory.device_id)
            self.report.slot = self.slot

    def fingerprint(self, content: Content) -> Fingerprint:
        """The fingerprint for a content."""
        description = self.description
        environment = environment_stamp(
            self.cfg.device,
            packages=description.packages,
            env_names=description.env_names,
            computes=description.computes or self.cfg.finalize is not None,
            environ=os.environ,
        )
        return fingerprint_of(
            self.cfg,
            description,
            environment,
            content=content,
            variant=self.options.variant,
            loader=description.loader,
            adapter=self.adapter,
            quantization=self.method,
            entry_device=str(self.memory.device),
        )

    # ---- the flow ------------------------------------------------------------------------------------------------------------

    def run(self) -> Attachment:
        try:
            self.describe()
        except UnsupportedQuantizationError as error:
            return self.refused(error)
        with self.identity:
            try:
                return self.through_daemon()
            except BaseException:
                self.close_connection()
                raise

    def through_daemon(self) -> Attachment:
        with self.report.phase("fingerprint"):
            # A variant is never produced here, so there is no production to agree on under a provisional key.
            provisional_key = self.identity.provisional() if self.options.variant is None else None
            content = self.identity.remembered() or provisional_key or self.identity.compute()
            fingerprint = self.fingerprint(content)
        while True:
            self.report.fingerprint = fingerprint.hex
            provisional = content.kind == "stat"
            try:
                reply, fds = self.ask(fingerprint, provisional)
            except _UNUSABLE as error:
                return self.unavailable(error)
            match reply:
                case Hit():
                    return self.hit(reply, fds, provisional)
                case Refused():
                    return self.remembered_refusal(reply)
                case Miss():
                    return self.miss(reply)
                case Produce() if provisional and (reply.hash_first or reply.others):
                    # What is cached may be the very entry; only the full content can tell. The files are read once, and then again
                    # from the page cache if a load is needed after all.
                    self.abort(reply.ticket, "hashing the checkpoint before loading it")
                    with self.report.phase("fingerprint"):
                        content = self.identity.compute()
                        fingerprint = self.fingerprint(content)
                case Produce():
                    return self.produce(reply, fingerprint, provisional)

    def ask(self, fingerprint: Fingerprint, provisional: bool) -> tuple[Hit | Produce | Miss | Refused, list[int]]:
        with self.report.phase("connect"):
            if self.connection is None or self.connection.is_closed:
                self.connection = connect_or_start(self.options.socket, start=self.options.start, timeout_s=_CONNECT_TIMEOUT_S)
        request = Attach(
            key=fingerprint.hex,
            device=self.memory.device_id,
            slot=self.slot,
            family=fingerprint.family,
            fields=fingerprint.encode(),
            provisional=provisional,
            produce=self.options.variant is None,
            wait_s=self.options.timeout_s,
        )
        told = False

        def on_waiting(waiting: Waiting) -> None:
            nonlocal told
            if not told:
                logger.info("waiting for another process that is producing %s (%s)", fingerprint.hex, waiting.phase)
                told = True

        with self.report.phase("wait"):
            return self.connection.attach(request, on_waiting=on_waiting)

    # ---- hit -----------------------------------------------------------------------------------------------------------------

    def hit(self, reply: Hit, fds: list[int], provisional: bool) -> Attachment:
        self.report.fingerprint = reply.key
        self.report.source = "waited" if reply.waited else "cache"
        try:
            manifest, segments = self.map(reply, fds)
            with self.report.phase("rebind"):
                done = rebind(self.built, manifest, segments, device=self.memory.device, requires_grad=self.options.requires_grad)
                self.adapter.prepare(self.cfg, self.built)
        except (RebindError, ManifestError, SegmentError, EncodingError) as error:
            return self.unfit(error)
        if provisional:
            self.identity.check_unchanged()  # the producer hashed the files as they were when this process looked at them
        self.report.mapped_nbytes, self.report.copied_nbytes = done.mapped_nbytes, done.copied_nbytes
        self.report.tensors = done.tensors
        logger.info("attached %s: %s", self.description.label, self.report)
        return Attachment(self.built, self.report, connection=self.connection, manifest=manifest, segments=segments)

    def map(self, reply: Hit, fds: list[int]) -> tuple[Manifest, list[MappedSegment]]:
        """Decode, check and map; closes the descriptors."""
        with self.report.phase("map"):
            try:
                manifest = decode_manifest(reply.manifest)
                if manifest.memory != self.memory.kind or manifest.device != self.memory.device_id:
                    raise ManifestError(
                        f"the entry lies in {manifest.memory} on {manifest.device}, not in {self.memory.kind} on "
                        f"{self.memory.device_id}",
                        path="$.memory",
                    )
                if manifest.fingerprint != reply.key:
                    raise ManifestError(f"the manifest is that of {manifest.fingerprint}, not of {reply.key}", path="$.fingerprint")
                sizes = [self.memory.size_of(fd) for fd in fds]
                validate(manifest, sizes)
                segments = [self.memory.map(fd, nbytes, access=self.options.access) for fd, nbytes in zip(fds, sizes, strict=True)]
            finally:
                for fd in fds:
                    os.close(fd)
        return manifest, segments

    def unfit(self, error: WeightCacheError) -> Attachment:
        """The entry and the module built here do not fit: never serve a mixture."""
        if self.policies.on_mismatch is Policy.ERROR:
            raise error
        return self.from_disk(f"the cached entry does not fit the module built here: {error}")

    # ---- miss ----------------------------------------------------------------------------------------------------------------

    def miss(self, reply: Miss) -> Attachment:
        variant = self.options.variant
        self.note_others(self.fingerprint(self.identity.compute()), reply.others)
        raise MismatchError(
            f"variant {variant!r} of {self.slot} is not in the cache, and only the process that published it can publish it"
            + "".join(f"\n  {difference}" for difference in self.report.differences),
            differences=self.report.differences,
        )

    def note_others(self, fingerprint: Fingerprint, others: tuple[OtherEntry, ...]) -> None:
        """Say in which fields the slot's entries differ: the closest one, field by field."""
        candidates = []
        for other in others:
            try:
                candidates.append(diff(fingerprint, Fingerprint.decode(other.fields)))
            except EncodingError as error:
                logger.warning("the daemon's record of entry %s cannot be read: %s", other.key, error)
        if candidates:
            self.report.differences = min(candidates, key=len)

    def produce(self, reply: Produce, fingerprint: Fingerprint, provisional: bool) -> Attachment:
        if reply.others:
            self.note_others(fingerprint, reply.others)
            text = "; ".join(str(difference) for difference in self.report.differences)
            if self.policies.on_mismatch is Policy.ERROR:
                self.abort(reply.ticket, "on_mismatch=error")
                raise MismatchError(
                    f"{self.slot} is cached under another fingerprint, which differs in: {text}",
                    differences=self.report.differences,
                )
            self.warn(f"the cached entry of {self.slot} differs: {text}; loading from disk")
        assert self.connection is not None
        try:
            make_room(self.connection, self.memory, _needed_nbytes(self.identity.nbytes))
        except _UNUSABLE as error:
            self.abort(reply.ticket, f"no memory: {error}")
            return self.unavailable(error)
        production = _Production(self, reply.ticket, fingerprint, provisional)
        return production.run()

    # ---- what is not served from the cache -----------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        logger.warning("%s", text)
        self.report.warnings += (text,)

    def from_disk(self, why: str) -> Attachment:
        self.warn(f"{why}; loading from disk without the cache")
        self.close_connection()
        self.report.mapped_nbytes = self.report.copied_nbytes = 0
        return attach_from_disk(self.cfg, self.report, requires_grad=self.options.requires_grad)

    def unavailable(self, error: WeightCacheError) -> Attachment:
        if self.policies.on_unavailable is Policy.ERROR or self.options.variant is not None:
            raise error
        return self.from_disk(f"{type(error).__name__}: {error}")

    def refused(self, error: WeightCacheError) -> Attachment:
        if self.policies.on_refused is Policy.ERROR:
            raise error
        return self.from_disk(f"{type(error).__name__}: {error}")

    def remembered_refusal(self, reply: Refused) -> Attachment:
        return self.refused(
            RefusedError(
                f"a process that loaded this model before found that it cannot be cached ({reply.kind}): {reply.reason}\n"
                "`torchwcache evict --refusals` forgets it; on_refused='load' starts without the cache",
                reason=reply.reason,
                kind=reply.kind,
            )
        )

    def abort(self, ticket: int, reason: str) -> None:
        """Give a production up; a daemon that went away does not need to be told."""
        if self.connection is not None and not self.connection.is_closed:
            try:
                self.connection.abort(ticket, reason=reason)
            except DaemonError as error:
                logger.debug("abort was not delivered: %s", error)

    def close_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()


def _needed_nbytes(checkpoint_nbytes: int) -> int:
    """Weights, and one segment beside them."""
    return checkpoint_nbytes + checkpoint_nbytes // 16


class _Production:
    """This process is the producer: load, publish, serve from what was published."""

    def __init__(self, attaching: _Attaching, ticket: int, fingerprint: Fingerprint, provisional: bool) -> None:
        self.attaching = attaching
        self.ticket, self.fingerprint, self.provisional = ticket, fingerprint, provisional
        self.cfg, self.adapter, self.memory = attaching.cfg, attaching.adapter, attaching.memory
        self.report, self.identity = attaching.report, attaching.identity
        assert attaching.connection is not None
        self.connection = attaching.connection

    def run(self) -> Attachment:
        if self.provisional:
            self.identity.start_background()
        classes = ClassSnapshot(self.attaching.built)
        with SegmentWriter(self.memory) as writer, Heartbeat(self.connection, self.ticket) as heartbeat:
            try:
                result = self.load(writer, heartbeat)
                self.identity.check_unchanged()
            except BaseException as error:
                self.attaching.abort(self.ticket, f"the load failed: {type(error).__name__}: {error}"[:4000])
                raise
            try:
                return self.publish(result, writer, heartbeat, classes)
            except REFUSALS as error:
                return self.refuse(error, result)
            except _UNUSABLE as error:
                self.attaching.abort(self.ticket, f"{type(error).__name__}: {error}"[:4000])
                return self.give_up(error, result)
            except BaseException as error:
                self.attaching.abort(self.ticket, f"{type(error).__name__}: {error}"[:4000])
                raise

    def load(self, writer: SegmentWriter, heartbeat: Heartbeat) -> LoadResult:
        context = LoadContext(
            allocate=writer.allocate, expect=writer.expect, read_file=self.memory.read_file, progress=heartbeat.update
        )
        with self.report.phase("load"):
            result = self.adapter.load(self.cfg, context)
        self.report.warnings += tuple(result.notes)
        return result

    def publish(self, result: LoadResult, writer: SegmentWriter, heartbeat: Heartbeat, classes: ClassSnapshot) -> Attachment:
        attaching, module = self.attaching, result.module
        if self.provisional:
            with self.report.phase("fingerprint"):
                self.fingerprint = attaching.fingerprint(self.identity.finish())
                self.report.fingerprint = self.fingerprint.hex
        check_publishable(self.cfg, result, attaching.method)
        heartbeat.phase("capture")
        with self.report.phase("capture"):
            captured = capture_module(self.cfg, self.adapter, module, attaching.built, attaching.construction, self.memory, classes)
        heartbeat.phase("publish")
        published = publish_module(
            captured,
            writer,
            self.connection,
            self.fingerprint,
            ticket=self.ticket,
            slot=attaching.slot,
            description=attaching.description,
            report=self.report,
            before_commit=self.identity.check_unchanged,
        )
        if published.hit is not None:
            return attaching.hit(published.hit, list(published.fds), provisional=False)
        self.report.source = "disk"
        _finish(self.cfg, self.adapter, module, attaching.options.requires_grad)
        logger.info("published %s: %s", attaching.description.label, self.report)
        return Attachment(module, self.report, connection=self.connection, manifest=published.manifest, segments=published.segments)

    def refuse(self, error: WeightCacheError, result: LoadResult) -> Attachment:
        """This model cannot be cached: tell everybody who waits, once, and remember it."""
        if not self.connection.is_closed:
            try:
                self.connection.refuse(self.ticket, key=self.fingerprint.hex, kind=refusal_kind(error), reason=str(error)[:60000])
            except DaemonError as failure:
                logger.debug("the refusal was not delivered: %s", failure)
        if self.attaching.policies.on_refused is Policy.ERROR:
            raise error
        return self.serve(f"{type(error).__name__}: {error}", result)

    def give_up(self, error: WeightCacheError, result: LoadResult) -> Attachment:
        if self.attaching.policies.on_unavailable is Policy.ERROR:
            raise error
        return self.serve(f"{type(error).__name__}: {error}", result)

    def serve(self, why: str, result: LoadResult) -> Attachment:
        """The module is loaded and works; only nobody else gets it."""
        self.attaching.warn(f"{why}; serving it unpublished")
        self.attaching.close_connection()
        return _serve_unpublished(
            self.cfg, self.adapter, LoadResult(module=result.module), self.report, self.attaching.options.requires_grad
        )


def publish_by_hand(cfg: ModelConfig, model: nn.Module, options: AttachOptions) -> Attachment:
    """``WeightCache.publish``: a model that the caller made, under a variant of its own."""
    attaching = _Attaching(cfg, options)
    attaching.describe()
    report = attaching.report
    with attaching.identity:
        with report.phase("fingerprint"):
            fingerprint = attaching.fingerprint(attaching.identity.remembered() or attaching.identity.compute())
            report.fingerprint = fingerprint.hex
        try:
            reply, fds = attaching.ask(fingerprint, provisional=False)
            if isinstance(reply, Hit):
                _raise_taken(options.variant, fds)
            check_publishable(cfg, LoadResult(module=model), attaching.method)
            with report.phase("capture"):
                captured = capture_module(
                    cfg, attaching.adapter, model, attaching.built, attaching.construction, attaching.memory, None
                )
            assert attaching.connection is not None
            make_room(attaching.connection, attaching.memory, _needed_nbytes(captured.nbytes))
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


def _raise_taken(variant: str | None, fds: Sequence[int]) -> NoReturn:
    for fd in fds:
        os.close(fd)
    raise ConfigError(
        f"variant {variant!r} of this model is published already, perhaps with other weights; evict it first, or choose another "
        "name"
    )


def verify_against_disk(cfg: ModelConfig, cache: DaemonCache) -> ParityReport:
    """Attach, load afresh, compare."""
    from torchwcache.module.parity import compare_modules

    adapter = adapter_for(cfg)
    with cache.attach(cfg) as attached:
        fresh = load_unpublished(cfg, adapter, memory_for(cfg.device)).module
        adapter.prepare(cfg, fresh)
        return compare_modules(fresh, attached, rules=adapter.rules(cfg, fresh))
