"""This process is the producer: load, publish, serve from what was published."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

from torchwcache.adapter import LoadContext, LoadResult
from torchwcache.attachment import Attachment
from torchwcache.config import Policy
from torchwcache.errors import DaemonError, WeightCacheError
from torchwcache.hashed_reads import HashedReads
from torchwcache.module.classes import ClassSnapshot
from torchwcache.module.one_at_a_time import one_at_a_time
from torchwcache.module.pack import SegmentWriter
from torchwcache.production import (
    REFUSALS,
    UNUSABLE,
    Heartbeat,
    capture_module,
    check_publishable,
    finish,
    publish_module,
    refusal_kind,
    serve_unpublished,
)
from torchwcache.wire.messages import Hit, Produce, Refused

if TYPE_CHECKING:
    from torchwcache.attaching import Attaching
    from torchwcache.identity.fingerprint import Fingerprint

__all__ = ["Production"]

logger = logging.getLogger(__name__)


class Production:
    """This process is the producer: load, publish, serve from what was published."""

    def __init__(self, attaching: Attaching, ticket: int, fingerprint: Fingerprint, provisional: bool) -> None:
        self.attaching = attaching
        self.ticket, self.fingerprint, self.provisional = ticket, fingerprint, provisional
        self.cfg, self.adapter, self.memory = attaching.cfg, attaching.adapter, attaching.memory
        self.report, self.identity = attaching.report, attaching.identity
        assert attaching.connection is not None
        self.connection = attaching.connection

    def run(self) -> Attachment:
        """Load, publish, and serve; whatever fails, the daemon is told and nothing half done is visible."""
        if self.provisional:
            self.identity.start_background()
        classes = ClassSnapshot(self.attaching.built)
        with SegmentWriter(self.memory) as writer, Heartbeat(self.connection, self.ticket) as heartbeat:
            try:
                result = self.load(writer, heartbeat)
                self.identity.check_unchanged()
            except BaseException as error:
                self.attaching.abort(self.ticket, f"the load failed: {type(error).__name__}: {error}"[:4000])
                if not isinstance(error, UNUSABLE):
                    raise
                # Segments ran out, not the model. What was loaded so far is let go of before anything is loaded elsewhere.
                traceback.clear_frames(error.__traceback__)
                no_segments = error
            else:
                return self.publish_or_serve(result, writer, heartbeat, classes)
        return self.attaching.unavailable(no_segments)

    def publish_or_serve(
        self, result: LoadResult, writer: SegmentWriter, heartbeat: Heartbeat, classes: ClassSnapshot
    ) -> Attachment:
        """Publish what was loaded, or serve it without that."""
        try:
            return self.publish(result, writer, heartbeat, classes)
        except REFUSALS as error:
            return self.refuse(error, result)
        except UNUSABLE as error:
            self.attaching.abort(self.ticket, f"{type(error).__name__}: {error}"[:4000])
            return self.give_up(error, result)
        except BaseException as error:
            self.attaching.abort(self.ticket, f"{type(error).__name__}: {error}"[:4000])
            raise

    def load(self, writer: SegmentWriter, heartbeat: Heartbeat) -> LoadResult:
        """The adapter's own pipeline, into segments where it can."""
        context = LoadContext(
            allocate=writer.allocate,
            expect=writer.expect,
            read_file=HashedReads(self.memory, self.identity).read_file,
            progress=heartbeat.update,
        )
        with self.report.phase("load"), one_at_a_time():
            result = self.adapter.load(self.cfg, context)
        self.report.warnings += tuple(result.notes)
        return result

    def publish(self, result: LoadResult, writer: SegmentWriter, heartbeat: Heartbeat, classes: ClassSnapshot) -> Attachment:
        """Check, capture, pack, commit."""
        attaching, module = self.attaching, result.module
        if self.provisional:
            with self.report.phase("fingerprint"):
                self.fingerprint = attaching.fingerprint(self.identity.finish())
                self.report.fingerprint = self.fingerprint.hex
            served = self.announce(result, heartbeat)
            if served is not None:
                return served
        check_publishable(self.cfg, result, attaching.method, attaching.description.quantization_config)
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
            access=attaching.options.access,
        )
        if published.hit is not None:
            return attaching.hit(published.hit, list(published.fds), provisional=False)
        self.report.source = "disk"
        finish(self.cfg, self.adapter, module, attaching.options.requires_grad)
        logger.info("published %s: %s", attaching.description.label, self.report)
        return Attachment(module, self.report, connection=self.connection, manifest=published.manifest, segments=published.segments)

    def announce(self, result: LoadResult, heartbeat: Heartbeat) -> Attachment | None:
        """Go on under the full key: the digest is remembered now, so whoever starts from here on asks by that key.

        Returns:
            What to serve when the entry turned out to be cached or refused already; ``None`` when it is still to be published.
        """
        reply, fds = self.attaching.ask(self.fingerprint, provisional=False)
        match reply:
            case Hit():
                return self.attaching.hit(reply, fds, provisional=False)
            case Refused():
                if self.attaching.policies.on_refused is Policy.ERROR:
                    return self.attaching.remembered_refusal(reply)
                return self.serve(f"{reply.kind}: {reply.reason}", result)
            case Produce():
                self.ticket = heartbeat.ticket = reply.ticket  # another one, if somebody else had to give up meanwhile
        return None

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
        """Publishing failed; the loaded module did not."""
        if self.attaching.policies.on_unavailable is Policy.ERROR:
            raise error
        return self.serve(f"{type(error).__name__}: {error}", result)

    def serve(self, why: str, result: LoadResult) -> Attachment:
        """The module is loaded and works; only nobody else gets it."""
        self.attaching.warn(f"{why}; serving it unpublished")
        self.attaching.close_connection()
        return serve_unpublished(
            self.cfg, self.adapter, LoadResult(module=result.module), self.report, self.attaching.options.requires_grad
        )
