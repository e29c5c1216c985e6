"""One client's connection as the daemon sees it: buffers and bounds."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from torchwcache.daemon.limits import ConnectionLimits
from torchwcache.wire import framing
from torchwcache.wire.messages import Reply

__all__ = ["Connection"]


class Connection:
    """Owns the socket of one client; never blocks.

    Attributes:
        number: Names the connection; not used twice.
        doomed: Why it will be closed as soon as its last reply is out, or ``None``.
        congested: Too many descriptors of this user are on their way (ETOOMANYREFS): to be tried again after a while.
    """

    def __init__(self, number: int, sock: socket.socket, *, limits: ConnectionLimits, now_s: float) -> None:
        self.number = number
        self.sock = sock
        self.doomed: str | None = None
        self.congested = False
        self._limits = limits
        self._reader = framing.FrameReader(framing.request_limit)
        self._writer = framing.FrameWriter()
        self._opened_s = now_s
        self._heard_s: float | None = None
        self._frame_since_s: float | None = None
        self._wrote_s: float | None = None

    @property
    def is_writing(self) -> bool:
        """Whether a reply is not out yet."""
        return self._writer.pending_nbytes > 0

    def read(self, now_s: float) -> framing.Frame | None:
        """A whole frame, if one has arrived. Raises as :meth:`FrameReader.read`."""
        frame = self._reader.read(self.sock)
        if frame is not None:
            self._heard_s, self._frame_since_s = now_s, None
        elif self._reader.partial and self._frame_since_s is None:
            self._frame_since_s = now_s
        return frame

    def queue(self, reply: Reply, fds: Sequence[int], now_s: float) -> None:
        """Send a reply as soon as the socket takes it.

        Raises:
            ProtocolError: It is over a cap.
        """
        if not self.is_writing:
            self._wrote_s = now_s
        self._writer.push(framing.encode(reply), fds)

    def flush(self, now_s: float) -> bool:
        """Write what the socket takes; returns whether everything is out.

        Raises:
            OSError: The client is gone.
        """
        before = self._writer.pending_nbytes
        self.congested = False
        try:
            return self._writer.flush(self.sock)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            self.congested = True
            return False
        finally:
            if self._writer.pending_nbytes < before:
                self._wrote_s = now_s

    def drop_at(self, *, engaged: bool) -> tuple[float, str] | None:
        """When this connection will have been silent for too long, and why; ``None`` when it may stay as it is."""
        if self.is_writing and self._wrote_s is not None:
            return self._wrote_s + self._limits.write_s, "it does not read the reply"
        if self._heard_s is None:
            return self._opened_s + self._limits.first_request_s, "it sent no request"
        if self._frame_since_s is not None:
            return self._frame_since_s + self._limits.frame_s, "it does not finish its request"
        if not engaged:
            return self._heard_s + self._limits.idle_s, "it is idle"
        return None

    def close(self) -> None:
        """Close the socket and forget what is in the buffers. Idempotent."""
        self._reader.close()
        self.sock.close()
