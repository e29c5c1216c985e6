"""The loop of the daemon: one thread, one selector, non-blocking sockets around the state machine. Imports no torch.

Nothing that a client sends or fails to send may stop the daemon or another client: bytes are parsed as they come, replies are
written as they are taken, and whoever keeps a connection open without a reason loses it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

from torchwcache import __version__
from torchwcache.daemon.connection import Connection
from torchwcache.daemon.endpoint import Endpoint
from torchwcache.daemon.events import CloseFds, Disconnected, Effect, Event, Exit, Received, Send, SendStatus, Shutdown, Tick
from torchwcache.daemon.limits import ConnectionLimits, StoreLimits
from torchwcache.daemon.store import Store
from torchwcache.errors import DaemonAlreadyRunningError, ProtocolError, SegmentError, WeightCacheError
from torchwcache.memory.seals import check_sealed
from torchwcache.wire import framing
from torchwcache.wire.address import peer_credentials
from torchwcache.wire.messages import PROTOCOL_VERSION, Commit, DaemonStatus, Failure, Reply, Waiting

__all__ = ["Server"]

_log = logging.getLogger(__name__)

_LOOK_AT_SOCKET_S = 5.0
_FAREWELL_S = 1.0
_RETRY_WRITE_S = 0.05
_LONGEST_TEXT = 60_000


class Server:
    """Carries events to the store and effects to the sockets. Owns all connections and all descriptors that the store holds."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        idle_timeout_s: float | None = None,
        warnings: Sequence[str] = (),
        store_limits: StoreLimits | None = None,
        connection_limits: ConnectionLimits | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._idle_timeout_s = idle_timeout_s
        self._warnings = tuple(warnings)
        self._store = Store(store_limits)
        self._limits = connection_limits or ConnectionLimits()
        self._connections: dict[int, Connection] = {}
        self._last_number = 0
        self._started_s = self._busy_s = self._looked_s = time.monotonic()
        self._events: deque[tuple[Event, float]] = deque()
        self._applying = False
        self._stop_requested = False
        self._exiting = False
        self._orphaned = False
        self._selector = selectors.DefaultSelector()
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._wakeup, self._wakeup_writer = socket.socketpair()
        for end in (self._wakeup, self._wakeup_writer):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        self._selector.register(endpoint.listener, selectors.EVENT_READ, None)

    @property
    def wakeup_fd(self) -> int:
        """A byte written here ends the wait for sockets."""
        return self._wakeup_writer.fileno()

    def request_stop(self) -> None:
        """Stop at the next turn of the loop. Safe in a signal handler."""
        self._stop_requested = True

    def serve(self) -> None:
        """Run until stopped."""
        while not self._exiting:
            ready = self._selector.select(self._patience(time.monotonic()))
            for key, mask in ready:
                connection = key.data
                if key.fileobj is self._wakeup:
                    self._drain_wakeup()
                elif connection is None:
                    self._accept()
                elif connection.number in self._connections:
                    self._guarded(connection, self._ready, mask)
            now_s = time.monotonic()
            self._apply(Tick(), now_s)
            self._drop_silent(now_s)
            self._look_after_itself(now_s)

    def close(self) -> None:
        """Close every connection and descriptor. Idempotent."""
        self._apply(Shutdown(), time.monotonic())
        for connection in list(self._connections.values()):
            self._drop(connection, "the daemon exits")
        self._selector.close()
        self._wakeup.close()
        self._wakeup_writer.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    # ---- the loop ------------------------------------------------------------------------------------------------------------

    def _patience(self, now_s: float) -> float:
        """How long nothing needs to be done unless a socket says so."""
        due = [now_s + _LOOK_AT_SOCKET_S]
        if (deadline_s := self._store.next_deadline()) is not None:
            due.append(deadline_s)
        for connection in self._connections.values():
            if drop := connection.drop_at(engaged=self._store.is_engaged(connection.number)):
                due.append(drop[0])
            if connection.congested:
                due.append(now_s + _RETRY_WRITE_S)
        if self._idle_timeout_s is not None and not self._connections:
            due.append(self._busy_s + self._idle_timeout_s)
        return max(min(due) - now_s, 0.0)

    def _drain_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(4096):
                pass

    def _drop_silent(self, now_s: float) -> None:
        for connection in list(self._connections.values()):
            if connection.congested:
                self._guarded(connection, self._flush, now_s)
            drop = connection.drop_at(engaged=self._store.is_engaged(connection.number))
            if drop and drop[0] <= now_s:
                self._drop(connection, drop[1])

    def _look_after_itself(self, now_s: float) -> None:
        if self._connections:
            self._busy_s = now_s
        elif self._orphaned or (self._idle_timeout_s is not None and now_s - self._busy_s >= self._idle_timeout_s):
            _log.info("no client is left, exiting")
            self._stop_requested = True
        if self._stop_requested and not self._exiting:
            self._apply(Shutdown(), now_s)
        elif now_s - self._looked_s >= _LOOK_AT_SOCKET_S:
            self._looked_s = now_s
            if not self._orphaned and not self._endpoint.is_intact():
                self._listen_again()

    def _listen_again(self) -> None:
        """Somebody removed our socket or its folder: without it nobody could reach, or even stop, this daemon again."""
        _log.warning("%s was removed, listening again", self._endpoint.path)
        self._selector.unregister(self._endpoint.listener)
        self._endpoint.close()
        try:
            self._endpoint.open()
        except DaemonAlreadyRunningError as error:
            _log.warning("another daemon has taken this place, exiting with the last client: %s", error)
            self._orphaned = True
        except OSError as error:
            _log.error("cannot listen again, exiting with the last client: %s", error)
            self._orphaned = True
        else:
            self._selector.register(self._endpoint.listener, selectors.EVENT_READ, None)

    # ---- connections ---------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._endpoint.listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                    return
                if error.errno in (errno.ECONNABORTED, errno.EINTR):
                    continue
                _log.exception("accept failed")
                return
            sock.setblocking(False)
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        now_s = time.monotonic()
        self._last_number += 1
        connection = Connection(self._last_number, sock, limits=self._limits, now_s=now_s)
        self._connections[connection.number] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        pid, uid = peer_credentials(sock)
        if uid != os.geteuid():
            _log.warning("process %d of uid %d is not served", pid, uid)
            self._guarded(connection, self._dismiss, "forbidden", f"uid {uid} is not served here, only uid {os.geteuid()} is")

    def _turn_away(self) -> None:
        """Out of descriptors: use the spare one to tell the client, instead of leaving it (and a busy loop) waiting."""
        _log.error("%s", text := _file_limit_text())
        if self._spare < 0:
            return
        os.close(self._spare)
        self._spare = -1
        with contextlib.suppress(OSError):
            sock, _ = self._endpoint.listener.accept()
            with sock:
                sock.setblocking(False)
                writer = framing.FrameWriter()
                writer.push(framing.encode(Failure(code="fd_limit", message=text)))
                writer.flush(sock)
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _guarded(self, connection: Connection, action: Callable[..., None], *args: object) -> None:
        """The top of everything that is done for one connection: whatever goes wrong there ends that connection alone."""
        try:
            action(connection, *args)
        except framing.PeerClosed as error:
            self._drop(connection, "it closed in the middle of a request" if error.partial else "it closed")
        except WeightCacheError as error:
            code = getattr(error, "code", "malformed")
            _log.warning("connection %d: %s", connection.number, error)
            self._guarded(connection, self._dismiss, code, str(error))
        except OSError as error:
            self._drop(connection, f"{error}")
        except Exception:
            _log.exception("connection %d: a request failed", connection.number)
            if connection.doomed:
                self._drop(connection, "an error in answering an error")
            else:
                self._guarded(connection, self._dismiss, "internal", "an error in the daemon, its log has the traceback")

    def _dismiss(self, connection: Connection, code: str, message: str) -> None:
        """Say why, then close as soon as that is out."""
        if connection.doomed:
            self._drop(connection, message)
            return
        connection.doomed = message
        self._reply(connection, Failure(code=code, message=message[:_LONGEST_TEXT]), ())

    def _drop(self, connection: Connection, why: str) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        _log.debug("connection %d ends: %s", connection.number, why)
        self._selector.unregister(connection.sock)
        connection.close()
        self._apply(Disconnected(connection.number), time.monotonic())

    def _ready(self, connection: Connection, mask: int) -> None:
        now_s = time.monotonic()
        if mask & selectors.EVENT_WRITE:
            self._flush(connection, now_s)
        if mask & selectors.EVENT_READ and connection.number in self._connections and not connection.doomed:
            frame = connection.read(now_s)
            if frame is not None:
                with frame:
                    self._request(connection, frame, now_s)

    def _request(self, connection: Connection, frame: framing.Frame, now_s: float) -> None:
        if frame.starved:
            self._reply(connection, Failure(code="fd_limit", message=_file_limit_text(frame.announced)), ())
            return
        request = framing.decode_request(frame.payload)
        if isinstance(request, Commit):
            try:
                _check_segments(request, frame.fds)
            except SegmentError as error:
                frame.close()  # before the answer: who reads it may count on our having let go
                self._reply(connection, Failure(code="bad_segments", message=str(error)), ())
                return
        elif frame.fds:
            raise ProtocolError(f"{type(request).__name__} carries no file descriptors", code="malformed")
        self._apply(Received(connection.number, request, tuple(frame.take())), now_s)

    def _reply(self, connection: Connection, reply: Reply, fds: Sequence[int]) -> None:
        now_s = time.monotonic()
        connection.queue(reply, fds, now_s)
        self._flush(connection, now_s)

    def _flush(self, connection: Connection, now_s: float) -> None:
        done = connection.flush(now_s)
        if connection.doomed and (done or connection.congested):
            self._drop(connection, connection.doomed)
            return
        # While a reply is not out, no further request is read: a client that asks and does not read fills its own socket, not our
        # memory. A doomed client's bytes must not wake the loop; nor must the room in the socket of one that waits for descriptors.
        mask = 0
        if done and not connection.doomed:
            mask |= selectors.EVENT_READ
        if not done and not connection.congested:
            mask |= selectors.EVENT_WRITE
        if self._selector.get_key(connection.sock).events != mask:
            self._selector.modify(connection.sock, mask, connection)

    # ---- effects -------------------------------------------------------------------------------------------------------------

    def _apply(self, event: Event, now_s: float) -> None:
        # An effect may fail and so make an event (a reply to a client that is gone): that one waits for its turn.
        self._events.append((event, now_s))
        if self._applying:
            return
        self._applying = True
        try:
            while self._events:
                event, now_s = self._events.popleft()
                for effect in self._store.handle(event, now_s=now_s):
                    self._carry_out(effect, now_s)
        finally:
            self._applying = False

    def _carry_out(self, effect: Effect, now_s: float) -> None:
        match effect:
            case Send(client, reply, fds):
                connection = self._connections.get(client)
                if connection and not (isinstance(reply, Waiting) and connection.is_writing):  # news can wait for the next
                    self._guarded(connection, self._reply, reply, fds)
            case SendStatus(client):
                if connection := self._connections.get(client):
                    self._guarded(connection, self._reply, self._status(now_s), ())
            case CloseFds(fds):
                framing.close_fds(fds)
            case Exit():
                self._exiting = True
                self._say_farewell()

    def _say_farewell(self) -> None:
        """Give the last replies a moment to leave."""
        deadline_s = time.monotonic() + _FAREWELL_S
        while (now_s := time.monotonic()) < deadline_s:
            writing = [connection for connection in self._connections.values() if connection.is_writing]
            if not writing:
                return
            for connection in writing:
                self._guarded(connection, self._flush, now_s)
            time.sleep(0.01)

    def _status(self, now_s: float) -> DaemonStatus:
        counts = self._store.counts()
        fd_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return DaemonStatus(
            version=__version__,
            protocol=PROTOCOL_VERSION,
            pid=os.getpid(),
            uptime_s=now_s - self._started_s,
            socket=self._endpoint.path,
            entries=counts.entries,
            leases=counts.leases,
            producing=counts.producing,
            waiting=counts.waiting,
            refusals=counts.refusals,
            nbytes=counts.nbytes,
            fds=_open_files(fd_limit),
            fd_limit=fd_limit,
            warnings=self._warnings,
        )


def _check_segments(commit: Commit, fds: Sequence[int]) -> None:
    if len(fds) != len(commit.segments):
        raise SegmentError(f"{len(commit.segments)} segments were committed with {len(fds)} file descriptors")
    if commit.memory == "memfd":
        for fd, nbytes in zip(fds, commit.segments, strict=True):
            check_sealed(fd, nbytes)


def _open_files(limit: int) -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # without the one that lists
    except OSError:  # none left to list them with
        return limit


def _file_limit_text(needed: int = 1) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"the daemon (pid {os.getpid()}) has no file descriptors left for {needed} more: its limit is {soft} (hard limit {hard})."
        " Evict entries, or restart it with a higher `ulimit -n`"
    )
