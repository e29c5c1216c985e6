"""Running the daemon in this process: limits, signals, a place to listen, and the loop. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from torchwcache.daemon.endpoint import Endpoint
from torchwcache.daemon.limits import ConnectionLimits, StoreLimits
from torchwcache.daemon.loop import Server

__all__ = ["run"]

_log = logging.getLogger(__name__)

_MAX_FILES = 2**20


def run(
    path: str,
    *,
    on_ready: Callable[[], None] | None = None,
    idle_timeout_s: float | None = None,
    warnings: Sequence[str] = (),
    store_limits: StoreLimits | None = None,
    connection_limits: ConnectionLimits | None = None,
) -> None:
    """Serve at ``path`` until SIGTERM, SIGINT or a stop request. Must be called in the main thread.

    Args:
        path: The socket.
        on_ready: Called once when clients can connect.
        idle_timeout_s: Exit after so many seconds without a connection, whatever is cached.
        warnings: Shown by ``status``.
        store_limits: Bounds for producers.
        connection_limits: Bounds for silent clients.

    Raises:
        DaemonAlreadyRunningError: Another daemon serves there; ``pid`` says which.
        UntrustedSocketError: The folder is not this user's alone.
        ConfigError: The path is too long.
    """
    _raise_file_limit()
    with contextlib.ExitStack() as stack:
        endpoint = Endpoint(path)
        endpoint.open()
        stack.callback(endpoint.close)
        server = Server(
            endpoint,
            idle_timeout_s=idle_timeout_s,
            warnings=warnings,
            store_limits=store_limits,
            connection_limits=connection_limits,
        )
        stack.callback(server.close)
        # Before the connections are closed: who asked for the stop and sees the end of its connection may start a new daemon.
        stack.callback(endpoint.close)
        stack.enter_context(_signals(server))
        _log.info("serving at %s (pid %d)", endpoint.path, os.getpid())
        if on_ready is not None:
            on_ready()
        server.serve()
    _log.info("stopped")


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, _MAX_FILES) if hard != resource.RLIM_INFINITY else _MAX_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def _signals(server: Server) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        server.request_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(server.wakeup_fd, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
