"""One attach, from the config to a module: hit, wait, miss, mismatch, refusal, and what to do about each."""

from __future__ import annotations

import functools
import logging
import os
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchwcache.adapter import Adapter, Description
from torchwcache.adapters import adapter_for
from torchwcache.attachment import Attachment, AttachReport
from torchwcache.config import Access, ModelConfig, Policies, Policy
from torchwcache.daemon.supervisor import connect_or_start
from torchwcache.errors import (
    DaemonError,
    EncodingError,
    EntryNotFoundError,
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
from torchwcache.module.detach import detach_mapped
from torchwcache.module.normal_tensors import normal_tensors
from torchwcache.module.one_at_a_time import one_at_a_time
from torchwcache.module.rebind import RebindReport, rebind
from torchwcache.producing import Production
from torchwcache.production import UNUSABLE, Heartbeat, attach_from_disk, make_room, module_nbytes, needed_nbytes
from torchwcache.quantization.registry import check_config
from torchwcache.wire.descriptors import widen_table
from torchwcache.wire.messages import Attach, Hit, Miss, OtherEntry, Produce, Refused, Waiting

if TYPE_CHECKING:
    from torch import nn

    from torchwcache.wire.client import DaemonConnection

__all__ = ["Answer", "AttachOptions", "Attaching", "attach_through_daemon"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0


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
    produce: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """What the daemon settled on, and under which fingerprint it was asked. The descriptors are the caller's."""

    reply: Hit | Produce | Miss | Refused
    fds: list[int]
    fingerprint: Fingerprint
    provisional: bool


@functools.cache
def _widen_table_once() -> None:
    widen_table()


def attach_through_daemon(cfg: ModelConfig, options: AttachOptions) -> Attachment:
    """The whole of ``WeightCache.attach`` in the modes ``client`` and ``daemon``."""
    return Attaching(cfg, options).run()


class Attaching:
    """The state of one attach."""

    def __init__(self, cfg: ModelConfig, options: AttachOptions, adapter: Adapter | None = None) -> None:
        self.cfg, self.options, self.policies = cfg, options, options.policies
        self.adapter: Adapter = adapter if adapter is not None else adapter_for(cfg)
        self.memory: Memory = memory_for(cfg.device)
        self.report = AttachReport()
        self.device_id: str
        self.built: nn.Module
        self.built_nbytes = 0
        self.construction: str
        self.description: Description
        self.identity: CheckpointIdentity
        self.method: str
        self.asked: Fingerprint | None = None
        self.connection: DaemonConnection | None = None
        self.undo = ExitStack()
        """Puts back what the module that was built has in common with others, where it is not going to be handed out."""

    # ---- what is asked for ---------------------------------------------------------------------------------------------------

    def describe(self, *, scratch: bool = False) -> None:
        """Build on meta, describe, gate by config, and stat the files. Reads no weights.

        Args:
            scratch: A live module of this model exists in the process already (design D11).
        """
        _widen_table_once()
        with self.report.phase("device"):
            self.device_id = self.memory.device_id  # on a GPU this makes the process's context, if it has none yet
        with self.report.phase("build"), one_at_a_time():
            if scratch:
                with self.adapter.scratch_build(self.cfg) as (self.built, self.construction):
                    pass
            else:
                self.built, self.construction = self.adapter.build(self.cfg)
            self.built_nbytes = module_nbytes(self.built)  # now: what an attach makes of it may be taken away again
        with self.report.phase("fingerprint"), one_at_a_time():
            self.description = self.adapter.describe(self.cfg, self.built)
            self.method = check_config(self.description.quantization_config, self.cfg.quantization)
            self.identity = CheckpointIdentity(self.description.checkpoint, mode=self.cfg.identity)
            self.slot = slot_of(self.cfg, self.description, self.device_id, self.adapter.name)
            self.report.slot = self.slot

    def fingerprint(self, content: Content) -> Fingerprint:
        """The fingerprint for a content.

        All the rest is looked at once, before the load: a load may change classes and settings that count (design D5), and every
        client asks by what they were before.
        """
        if self.asked is not None:
            return self.asked.with_content(content)
        description = self.description
        with one_at_a_time():  # no setting is read while another thread's load has it changed
            environment = environment_stamp(
                self.cfg.device,
                packages=description.packages,
                env_names=description.env_names,
                computes=description.computes or self.cfg.finalize is not None,
                environ=os.environ,
            )
        self.asked = fingerprint_of(
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
        return self.asked

    # ---- the flow ------------------------------------------------------------------------------------------------------------

    def run(self) -> Attachment:
        """Do it all."""
        with normal_tensors():
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
        """Ask the daemon until the answer settles what to do, and do it."""
        try:
            answer = self.settle()
        except UNUSABLE as error:
            return self.unavailable(error)
        match answer.reply:
            case Hit():
                return self.hit(answer.reply, answer.fds, answer.provisional)
            case Refused():
                return self.remembered_refusal(answer.reply)
            case Miss():
                return self.miss(answer.reply)
            case Produce():
                return self.produce(answer.reply, answer.fingerprint, answer.provisional)

    def settle(self) -> Answer:
        """Ask the daemon until the answer settles what to do.

        Raises:
            DaemonError: The daemon cannot be reached or used.
        """
        with self.report.phase("fingerprint"):
            content = self.first_content()
            fingerprint = self.fingerprint(content)
        while True:
            self.report.fingerprint = fingerprint.hex
            provisional = content.kind == "stat"
            reply, fds = self.ask(fingerprint, provisional)
            if not (isinstance(reply, Produce) and provisional and (reply.hash_first or reply.others)):
                return Answer(reply, fds, fingerprint, provisional)
            # What is cached may be the very entry; only the full content can tell. The files are read once now, and then
            # again from the page cache if a load is needed after all. Asking anew takes ticket and waiters along.
            with self.report.phase("fingerprint"), Heartbeat(self.connection_in_use(), reply.ticket, phase="hash"):
                content = self.identity.compute()
                fingerprint = self.fingerprint(content)

    def first_content(self) -> Content:
        """What to ask by: the content where it is known, a provisional key where that will do, else what a read tells."""
        # Where nothing is going to be produced there is no production to agree on under a provisional key.
        provisional_key = self.identity.provisional() if self.options.produce and self.options.variant is None else None
        return self.identity.remembered() or provisional_key or self.identity.compute()

    def ask(self, fingerprint: Fingerprint, provisional: bool) -> tuple[Hit | Produce | Miss | Refused, list[int]]:
        """Connect if need be, and ask for the entry: one round trip, and the wait for another producer."""
        with self.report.phase("connect"):
            connection = self.connected()
        request = Attach(
            key=fingerprint.hex,
            device=self.device_id,
            slot=self.slot,
            family=fingerprint.family,
            fields=fingerprint.encode(),
            provisional=provisional,
            produce=self.options.produce and self.options.variant is None,
            wait_s=self.options.timeout_s,
        )
        told = False

        def on_waiting(waiting: Waiting) -> None:
            nonlocal told
            if not told:
                logger.info("waiting for another process that is producing %s (%s)", fingerprint.hex, waiting.phase)
                told = True

        with self.report.phase("wait"):
            return connection.attach(request, on_waiting=on_waiting)

    def connected(self) -> DaemonConnection:
        """The connection, made anew where there is none."""
        if self.connection is None or self.connection.is_closed:
            self.connection = connect_or_start(self.options.socket, start=self.options.start, timeout_s=_CONNECT_TIMEOUT_S)
        return self.connection

    def weights_nbytes(self) -> int:
        """Bytes of the weights of what is built here: of one rank's shard, where the checkpoint's files are those of all ranks."""
        if self.built_nbytes or not hasattr(self, "identity"):
            return self.built_nbytes  # 0 where it could not be built, either
        return self.identity.nbytes

    # ---- hit -----------------------------------------------------------------------------------------------------------------

    def hit(self, reply: Hit, fds: list[int], provisional: bool) -> Attachment:
        """Map the entry and rebind the module that was built here."""
        self.report.fingerprint = reply.key
        self.report.source = "waited" if reply.waited else "cache"
        segments: list[MappedSegment] = []
        try:
            manifest, done = self.bind(reply, fds, segments)
            if provisional:
                self.identity.check_unchanged()  # the producer hashed the files as they were when this process looked at them
        except BaseException as error:  # also when there is no memory for the copy of a buffer
            self.give_back(error, segments)
            if not isinstance(error, (RebindError, ManifestError, SegmentError, EncodingError)):
                raise
            return self.unfit(error)
        self.report.mapped_nbytes, self.report.copied_nbytes = done.mapped_nbytes, done.copied_nbytes
        self.report.tensors = done.tensors
        logger.info("attached %s: %s", self.description.label, self.report)
        return Attachment(
            self.built, self.report, connection=self.connection, manifest=manifest, segments=segments, plain=done.plain
        )

    def bind(self, reply: Hit, fds: list[int], segments: list[MappedSegment]) -> tuple[Manifest, RebindReport]:
        """Map, and put what is mapped into the module that was built here; closes the descriptors.

        Args:
            reply: What was found.
            fds: Its descriptors.
            segments: Gets what is mapped, whatever goes wrong afterwards.
        """
        manifest, mapped = self.map(reply, fds)
        segments += mapped
        with self.report.phase("rebind"):
            device, requires_grad = self.memory.device, self.options.requires_grad
            done = rebind(self.built, manifest, segments, device=device, requires_grad=requires_grad, undo=self.undo)
            for segment in segments:
                segment.settle()
            if done.copied_nbytes:
                self.memory.finish_copies()
            self.adapter.prepare(self.cfg, self.built)
        return manifest, done

    def map(self, reply: Hit, fds: list[int]) -> tuple[Manifest, Sequence[MappedSegment]]:
        """Decode, check and map; closes the descriptors."""
        with self.report.phase("map"):
            try:
                manifest = decode_manifest(reply.manifest)
                if manifest.memory != self.memory.kind or manifest.device != self.device_id:
                    raise ManifestError(
                        f"the entry lies in {manifest.memory} on {manifest.device}, not in {self.memory.kind} on {self.device_id}",
                        path="$.memory",
                    )
                if manifest.fingerprint != reply.key:
                    raise ManifestError(f"the manifest is that of {manifest.fingerprint}, not of {reply.key}", path="$.fingerprint")
                if len(fds) != len(manifest.segments):
                    raise ManifestError(f"{len(manifest.segments)} segments, {len(fds)} descriptors", path="$.segments")
                sizes = [self.memory.size_of(fd, stated) for fd, stated in zip(fds, manifest.segments, strict=True)]
                validate(manifest, sizes)
                segments = self.memory.map_all(fds, sizes, access=self.options.access, addresses=manifest.addresses)
                if manifest.addresses:
                    self.report.same_addresses = manifest.addresses == tuple(segment.address for segment in segments)
            finally:
                for fd in fds:
                    os.close(fd)
        return manifest, segments

    def give_back(self, error: BaseException, segments: list[MappedSegment]) -> None:
        """Unmap what was mapped before something went wrong: there may not be room beside it for what is loaded instead.

        What the module that was built has in common with others, the one that is loaded instead among them, is as it was before.
        """
        known: list[BaseException] = [error]
        # Not the context: that may be what the caller is in the middle of handling.
        while (cause := known[-1].__cause__) is not None and cause not in known:
            known.append(cause)
        for one in known:  # as long as it is, so would be what its frames hold
            traceback.clear_frames(one.__traceback__)
        self.undo.close()
        detach_mapped(self.built, segments)
        segments.clear()

    def unfit(self, error: WeightCacheError) -> Attachment:
        """The entry and the module built here do not fit: never serve a mixture."""
        if self.policies.on_mismatch is Policy.ERROR:
            raise error
        return self.from_disk(f"the cached entry does not fit the module built here: {error}")

    # ---- miss ----------------------------------------------------------------------------------------------------------------

    def miss(self, reply: Miss) -> Attachment:
        """Not there, and not to be produced here: a variant that nobody published must not be served by anything else."""
        variant = self.options.variant
        self.note_others(self.fingerprint(self.identity.compute()), reply.others)
        if variant is None:
            differ = "".join(f"\n  the closest entry of this slot differs in {item}" for item in self.report.differences)
            raise EntryNotFoundError(f"{self.slot} is not in the cache{differ}", differences=self.report.differences)
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
        """This process is the producer; first the mismatch policy, then room in memory."""
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
        try:
            make_room(self.connection_in_use(), self.memory, needed_nbytes(self.memory, self.weights_nbytes()))
        except UNUSABLE as error:
            self.abort(reply.ticket, f"no memory: {error}")
            return self.unavailable(error)
        production = Production(self, reply.ticket, fingerprint, provisional)
        return production.run()

    # ---- what is not served from the cache -----------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        """Say it in the log and in the report."""
        logger.warning("%s", text)
        self.report.warnings += (text,)

    def from_disk(self, why: str) -> Attachment:
        """Start as if there were no cache, and say why."""
        self.warn(f"{why}; loading from disk without the cache")
        self.close_connection()
        self.report.mapped_nbytes = self.report.copied_nbytes = 0
        return attach_from_disk(self.cfg, self.report, requires_grad=self.options.requires_grad, adapter=self.adapter)

    def unavailable(self, error: WeightCacheError) -> Attachment:
        """The cache cannot be used; a variant exists nowhere else."""
        if self.policies.on_unavailable is Policy.ERROR or self.options.variant is not None:
            raise error
        return self.from_disk(f"{type(error).__name__}: {error}")

    def refused(self, error: WeightCacheError) -> Attachment:
        """The model cannot be cached."""
        if self.policies.on_refused is Policy.ERROR:
            raise error
        return self.from_disk(f"{type(error).__name__}: {error}")

    def remembered_refusal(self, reply: Refused) -> Attachment:
        """Another process found out that the model cannot be cached."""
        return self.refused(
            RefusedError(
                f"a process that loaded this model before found that it cannot be cached ({reply.kind}): {reply.reason}\n"
                f"`torchwcache evict {self.report.fingerprint} --refusals` forgets it; on_refused='load' starts without the cache",
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

    def connection_in_use(self) -> DaemonConnection:
        """The connection that the last answer came over."""
        assert self.connection is not None
        return self.connection

    def close_connection(self) -> None:
        """End the lease, or the request."""
        if self.connection is not None:
            self.connection.close()
