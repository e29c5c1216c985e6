"""What an engine's loader calls in each of its ranks: all attach, or all load (design D15).

The daemon is asked rank after rank, in the same order in every engine. Were they to ask at once, two engines that start together
could each hold the leave to produce one shard while waiting for the other's, and neither could load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from torchwcache.adapter import Adapter, LoadResult
from torchwcache.attaching import Answer, Attaching, AttachOptions
from torchwcache.attachment import Attachment
from torchwcache.config import (
    Access,
    Identity,
    Mode,
    ModelConfig,
    Policies,
    Policy,
    access_from,
    mode_from,
    policies_from,
    timeout_from,
)
from torchwcache.daemon.supervisor import default_socket_path
from torchwcache.engine_ranks import GridRanks, OneRank, ProcessGroupRanks, RankGroup
from torchwcache.errors import CheckpointChangedError, ConfigError, MismatchError, RankError, WeightCacheError
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.normal_tensors import normal_tensors
from torchwcache.module.pack import SegmentWriter
from torchwcache.producing import Production
from torchwcache.production import UNUSABLE, Heartbeat, free_up, load_unpublished, make_room, needed_nbytes, serve_unpublished
from torchwcache.wire.messages import Hit, Produce, Refused

__all__ = ["EngineOptions", "GridRanks", "OneRank", "ProcessGroupRanks", "RankGroup", "RankStart", "attach_rank"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_KEYS = frozenset(
    {
        "mode",
        "socket",
        "on_mismatch",
        "on_unavailable",
        "on_refused",
        "fallback",
        "access",
        "timeout_s",
        "identity",
        "ignore",
        "constants",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What a user may say to an engine about the cache. ``TORCHWCACHE_*`` goes before what is written here.

    Attributes:
        mode: ``off`` unless asked for; an adapter whose flag *is* the asking passes another default.
        socket: The daemon's socket.
        policies: As in ``WeightCache.attach``, but ``on_refused`` is ``load``: the engine starts as without us, and says why.
        access: What this process's own write to a shared weight does (host memory).
        timeout_s: How long to wait for another process that is producing the entry.
        identity: How the checkpoint's content is established.
        ignore: Python attributes that need not be carried, pattern to reason.
        constants: Patterns of tensors that nothing writes after loading.
    """

    mode: Mode
    socket: str
    policies: Policies
    access: Access = Access.COPY_ON_WRITE
    timeout_s: float = 600.0
    identity: Identity = Identity.FULL
    ignore: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()

    @classmethod
    def split(
        cls, mapping: Mapping[str, Any], *, default_mode: Mode = Mode.OFF, environ: Mapping[str, str] = os.environ
    ) -> tuple[EngineOptions, dict[str, Any]]:
        """Take our keys out of a mapping of options; also returns the rest, which is somebody else's.

        Raises:
            ConfigError: A value is not one of those allowed.
        """
        ours = {key: value for key, value in mapping.items() if key in _KEYS}
        rest = {key: value for key, value in mapping.items() if key not in _KEYS}
        socket = environ.get("TORCHWCACHE_SOCKET") or ours.get("socket") or default_socket_path(environ)
        probe = ModelConfig(
            "-", identity=ours.get("identity", Identity.FULL), ignore=ours.get("ignore"), constants=ours.get("constants", ())
        )
        return (
            cls(
                mode=mode_from(ours.get("mode", default_mode), environ),
                socket=str(socket),
                policies=policies_from(
                    on_mismatch=ours.get("on_mismatch"),
                    on_unavailable=ours.get("on_unavailable"),
                    on_refused=ours.get("on_refused", Policy.LOAD),
                    fallback=ours.get("fallback"),
                    environ=environ,
                ),
                access=access_from(ours.get("access", Access.COPY_ON_WRITE)),
                timeout_s=timeout_from(ours.get("timeout_s", 600.0)),
                identity=probe.identity,
                ignore=dict(probe.ignore),
                constants=probe.constants,
            ),
            rest,
        )

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any], *, default_mode: Mode = Mode.OFF, environ: Mapping[str, str] = os.environ
    ) -> EngineOptions:
        """Options of a mapping that is ours alone.

        Raises:
            ConfigError: There is a key that we do not know, or a value that is not allowed.
        """
        options, rest = cls.split(mapping, default_mode=default_mode, environ=environ)
        if rest:
            raise ConfigError(f"unknown torchwcache options {sorted(rest)}; there are {sorted(_KEYS)}")
        return options


class _LoadInsteadError(Exception):
    """The cache cannot serve this rank, and the policies say to load."""


class _RankAttaching(Attaching):
    """An attach whose every fallback is first agreed on with the other ranks."""

    def from_disk(self, why: str) -> NoReturn:
        raise _LoadInsteadError(why)


class RankStart:
    """The start of one rank. :meth:`decide` and :meth:`finish` must be called by all ranks of the group.

    Args:
        cfg: The model, with this rank's place in the parallel layout.
        adapter: Knows how this engine builds and loads; usually made for this one start, around the engine's live configuration.
        options: From :meth:`EngineOptions.split`; its mode must not be ``off``.
        group: The ranks that load together.
        say: Where the one line of every rank goes: the engine's own log.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        adapter: Adapter,
        options: EngineOptions,
        group: RankGroup | None = None,
        *,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        if options.mode is Mode.OFF:
            raise ConfigError("mode is off: the engine's own loader is to be called, not the cache")
        self.cfg, self.adapter, self.say = cfg, adapter, say
        self.group: RankGroup = group if group is not None else OneRank()
        attach_options = AttachOptions(
            socket=options.socket,
            start=options.mode is Mode.DAEMON,
            policies=options.policies,
            access=options.access,
            timeout_s=options.timeout_s,
        )
        self.attaching = _RankAttaching(cfg, attach_options, adapter)
        self.report = self.attaching.report
        self.answer: Answer | None = None
        self.attachment: Attachment | None = None
        self.why = ""
        """Why all ranks load without the cache; empty while they need not."""
        self.error: BaseException | None = None
        self.evicted_nbytes = 0
        """Bytes on this rank's device that nobody used, and that were evicted for this start."""
        self.shared = False
        """Whether weights of any rank are shared, once :meth:`finish` has returned: what ranks do together, all refuse together."""
        self._decided = False
        self._stack = contextlib.ExitStack()
        self._heartbeat: Heartbeat | None = None

    # ---- what all ranks decide -----------------------------------------------------------------------------------------------

    def decide(self) -> bool:
        """Whether all ranks are attached now. Otherwise :meth:`finish` loads in all of them.

        The decision is made under leases: what was found stays there. Nothing is loaded yet, and no device memory was allocated.

        Raises:
            WeightCacheError: A policy says to stop the start, in this rank or (``RankError``) in another.
        """
        self._decided = True
        try:
            with normal_tensors():
                self._decide()
        except BaseException:
            self.close()
            raise
        return self.attachment is not None

    def _decide(self) -> None:
        self._step(self._describe)
        if not self._agreed("the description of the model"):
            return
        for turn in range(self.group.size):
            if turn == self.group.rank:
                self._step(self._ask)
            if not self._agreed(f"the answer to rank {turn}"):
                return
        words = self.group.exchange("hit" if isinstance(self._answer().reply, Hit) else "miss", "hit or miss")
        if all(word == "hit" for word in words):
            self._step(self._rebind, refusable=False)
            self._agreed("the module rebound")
        else:
            misses = [str(rank) for rank, word in enumerate(words) if word != "hit"]
            logger.debug("not in the cache: the shards of ranks %s of %d", ", ".join(misses), self.group.size)

    def _answer(self) -> Answer:
        assert self.answer is not None
        return self.answer

    def _describe(self) -> None:
        self.attaching.describe()
        self._stack.enter_context(self.attaching.identity)

    def _ask(self) -> None:
        attaching = self.attaching
        answer = self.answer = attaching.settle()
        reply = answer.reply
        if isinstance(reply, Refused):
            attaching.remembered_refusal(reply)
        if isinstance(reply, Produce):
            self._heartbeat = self._stack.enter_context(Heartbeat(attaching.connection_in_use(), reply.ticket))
            if reply.others:
                attaching.note_others(answer.fingerprint, reply.others)
                text = "; ".join(map(str, self.report.differences))
                if attaching.policies.on_mismatch is Policy.ERROR:
                    self.error = MismatchError(
                        f"{attaching.slot} is cached under another fingerprint, which differs in: {text}",
                        differences=self.report.differences,
                    )
                else:
                    attaching.warn(f"the cached entry of {attaching.slot} differs: {text}; loading from disk")

    def _rebind(self) -> None:
        answer = self._answer()
        assert isinstance(answer.reply, Hit)
        fds, answer.fds[:] = list(answer.fds), []
        self.attachment = self.attaching.hit(answer.reply, fds, answer.provisional)

    def _step(self, work: Callable[[], None], *, refusable: bool = True) -> None:
        """Do this rank's part; what goes wrong is kept until all ranks know."""
        attaching = self.attaching
        try:
            try:
                work()
            except UNUSABLE as error:
                attaching.unavailable(error)
            except (ConfigError, MismatchError):
                raise
            except WeightCacheError as error:
                # A file that was touched meanwhile says nothing against what the engine loads by itself, only against sharing it.
                if not refusable and not isinstance(error, CheckpointChangedError):
                    raise
                attaching.refused(error)
        except _LoadInsteadError as instead:
            self.why = str(instead)
        except Exception as error:  # whatever it is, the other ranks must not wait for a rank that is not going to come
            self.error = error

    def _agreed(self, what: str) -> bool:
        """Whether all ranks may go on with the cache.

        Raises:
            WeightCacheError: One of them must not start at all.
        """
        word = f"stop {self.error}" if self.error is not None else f"load {self.why}" if self.why else "go"
        words = self.group.exchange(word, what)
        if self.error is not None:
            raise self.error
        for rank, other in enumerate(words):
            if other.startswith("stop "):
                raise RankError(f"rank {rank} of {self.group.size} stopped the start: {other.removeprefix('stop ')}")
        if all(other == "go" for other in words):
            return True
        if not self.why:
            rank, other = next((rank, other) for rank, other in enumerate(words) if other != "go")
            self.why = f"rank {rank} cannot use the cache ({other.removeprefix('load ')})"
        self._let_go(self.why)
        return False

    def _let_go(self, why: str) -> None:
        """Give back lease and ticket: this rank loads as if there were no cache."""
        if self.attachment is not None:
            self.attaching.undo.close()
            self.attachment.close()
            self.attachment = None
        if self.answer is not None:
            for fd in self.answer.fds:
                os.close(fd)
            self.answer.fds.clear()
            if isinstance(self.answer.reply, Produce):
                self.attaching.abort(self.answer.reply.ticket, why[:4000])
        self.answer = None
        self._stop_heartbeat()
        self.attaching.close_connection()

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.__exit__()
            self._heartbeat = None

    # ---- attach or load ------------------------------------------------------------------------------------------------------

    def finish(self) -> Attachment:
        """The model: attached where :meth:`decide` found it, otherwise loaded, and published where that was agreed on.

        Raises:
            WeightCacheError: A policy says to stop the start.
        """
        if not self._decided:
            self.decide()
        try:
            with normal_tensors():
                if self.attachment is None:
                    attachment = self._load()
                else:
                    attachment, self.shared = self.attachment, True  # in all ranks: that was agreed on
        except BaseException:
            self.close()
            raise
        self._stack.close()
        self.say(self.summary())
        return attachment

    def close(self) -> None:
        """Give back everything. For a start that does not take place; idempotent."""
        with contextlib.suppress(OSError):
            self._let_go(f"the start was given up: {self.error or self.why}")
        self._stack.close()

    def _load(self) -> Attachment:
        attaching = self.attaching
        if self.answer is not None:
            self._give_hit_back(self.answer)
            self._step(self._make_room)
            self._agreed("room in memory")
        if self.answer is None:
            self.free_up(attaching.weights_nbytes())
        with SegmentWriter(attaching.memory) as writer:
            if self.answer is None:  # without the cache, in all ranks
                result = self._load_by_engine()
                self._step(lambda: self._serve(result, f"{self.why}; loading from disk without the cache"), refusable=False)
            else:
                self._load_and_publish(self.answer, writer)
        self._agreed_at_last()
        assert self.attachment is not None
        return self.attachment

    def _load_and_publish(self, answer: Answer, writer: SegmentWriter) -> None:
        attaching = self.attaching
        classes = ClassSnapshot(attaching.built)
        if answer.provisional and self.group.rank == 0:
            attaching.identity.start_background()
        result = self._load_by_engine()
        # One rank reads the files for all: it leaves the digest where the others find it.
        if self.group.rank == 0:
            self._step(self._finish_content)
        self.group.exchange("content", "the content of the checkpoint")
        self._step(self._finish_content)
        if not self.why and self.error is None:
            self._step(lambda: self._publish(answer, result, writer, classes), refusable=False)
        if self.attachment is None and self.error is None:
            if isinstance(answer.reply, Produce):
                attaching.abort(answer.reply.ticket, self.why[:4000])
            self._step(lambda: self._serve(result, f"{self.why}; serving it unpublished"), refusable=False)

    def _give_hit_back(self, answer: Answer) -> None:
        """Another rank has to load, and its collectives need all ranks. What is cached may have to make room for what is loaded."""
        if isinstance(answer.reply, Hit):
            for fd in answer.fds:
                os.close(fd)
            answer.fds.clear()
            self.attaching.close_connection()

    def _make_room(self) -> None:
        # By this rank's own shard: what all ranks load together may be larger than any device.
        memory = self.attaching.memory
        self.evicted_nbytes += make_room(self.attaching.connected(), memory, self.needed_nbytes())

    def needed_nbytes(self) -> int:
        """Bytes of this rank's device that a load and a publish take."""
        return needed_nbytes(self.attaching.memory, self.attaching.weights_nbytes())

    def free_up(self, nbytes: int, free: Callable[[], int] | None = None) -> int:
        """Evict what nobody uses on this rank's device until ``nbytes`` are free, if that can be had so. Never raises for it.

        Args:
            nbytes: How many the engine wants.
            free: How many are free by the engine's own count.

        Returns:
            Bytes of what was evicted.
        """
        if self.attachment is None and self.answer is not None:
            self._give_hit_back(self.answer)
        evicted = free_up(self.attaching.options.socket, self.attaching.memory, nbytes, free)
        self.evicted_nbytes += evicted
        return evicted

    def _finish_content(self) -> None:
        if not self.why and self.error is None:
            self.attaching.identity.finish()

    def _load_by_engine(self) -> LoadResult:
        try:
            with self.report.phase("load"):
                return load_unpublished(self.cfg, self.adapter, self.attaching.memory, publishes=self.answer is not None)
        except BaseException as error:
            # Not kept until all ranks know: they may be waiting for this one inside the load.
            if self.answer is not None and isinstance(self.answer.reply, Produce):
                self.attaching.abort(self.answer.reply.ticket, f"the load failed: {type(error).__name__}: {error}"[:4000])
            raise

    def _publish(self, answer: Answer, result: LoadResult, writer: SegmentWriter, classes: ClassSnapshot) -> None:
        attaching, reply = self.attaching, answer.reply
        if not isinstance(reply, Produce):
            # This rank had a hit before. By now it may be there still, or evicted, or in production elsewhere: which is not waited
            # for, since what is loaded can be served.
            attaching.options = dataclasses.replace(attaching.options, timeout_s=0.0)
            again = attaching.settle()
            if isinstance(again.reply, Hit):
                self.attachment = attaching.hit(again.reply, again.fds, again.provisional)
                return
            if not isinstance(again.reply, Produce):
                raise _LoadInsteadError("it was refused meanwhile")
            reply, answer = again.reply, again
            self._heartbeat = self._stack.enter_context(Heartbeat(attaching.connection_in_use(), reply.ticket))
        assert self._heartbeat is not None
        production = Production(attaching, reply.ticket, answer.fingerprint, answer.provisional)
        self.attachment = production.publish_or_serve(result, writer, self._heartbeat, classes)

    def _serve(self, result: LoadResult, why: str) -> None:
        self._stop_heartbeat()
        self.attaching.warn(why)
        self.attaching.close_connection()
        self.report.mapped_nbytes = self.report.copied_nbytes = 0
        self.attachment = serve_unpublished(self.cfg, self.adapter, result, self.report, requires_grad=False)

    def _agreed_at_last(self) -> None:
        """No rank serves when one was told to stop, and all learn whether weights of any of them are shared."""
        report = self.report
        mine = "shared" if report.source != "disk" or report.sealed else "private"
        words = self.group.exchange(mine if self.error is None else f"stop {self.error}", "the end of the load")
        self.shared = "shared" in words
        if self.error is not None:
            raise self.error
        for rank, word in enumerate(words):
            if word.startswith("stop "):
                raise RankError(f"rank {rank} of {self.group.size} stopped the start: {word.removeprefix('stop ')}")

    def summary(self) -> str:
        """One line: hit, waited, or miss and why; bytes and seconds."""
        report = self.report
        where = f"rank {self.group.rank} of {self.group.size}" if self.group.size > 1 else "one rank"
        if report.source != "disk":
            what = "hit" if report.source == "cache" else "waited for another process that loaded it, then hit"
            what += f": {report.mapped_nbytes:,} bytes mapped, {report.copied_nbytes:,} copied, nothing read"
        elif report.published:
            nbytes = report.mapped_nbytes + report.copied_nbytes
            what = f"miss ({self._why_missed()}): loaded by the engine, {nbytes:,} bytes published"
        else:
            what = f"miss: loaded by the engine, not published ({'; '.join(report.warnings) or self.why})"
        line = f"torchwcache, {where}, {self.cfg.role.value}: {what}; {report.total_s:.2f} s; {report.fingerprint or '-'}"
        return " ".join(line.split())

    def _why_missed(self) -> str:
        if self.report.differences:
            return "the cached entry differs in " + "; ".join(map(str, self.report.differences))
        return "not in the cache"


def attach_rank(
    cfg: ModelConfig,
    adapter: Adapter,
    options: EngineOptions,
    group: RankGroup | None = None,
    *,
    say: Callable[[str], None] = logger.info,
) -> Attachment:
    """Attach this rank's model, or load and publish it: whichever all ranks agree on. See :class:`RankStart`."""
    start = RankStart(cfg, adapter, options, group, say=say)
    start.decide()
    return start.finish()
