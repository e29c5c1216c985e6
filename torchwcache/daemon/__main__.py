"""``python -m torchwcache.daemon``: the daemon as a process of its own. The command line for users is ``torchwcache daemon``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys

from torchwcache.daemon import server
from torchwcache.daemon.lifetime import shared_lifetime
from torchwcache.errors import WeightCacheError
from torchwcache.wire.address import default_socket_path


def main() -> int:
    """Run a daemon, in the foreground or (the default) in the background."""
    parser = argparse.ArgumentParser(prog="python -m torchwcache.daemon", description="Run the torchwcache daemon.")
    parser.add_argument("--socket", default=default_socket_path(os.environ), help="path of the socket (default: %(default)s)")
    parser.add_argument("--foreground", action="store_true", help="stay in this process")
    parser.add_argument("--idle-timeout", type=float, metavar="SECONDS", help="exit after so long without a client")
    parser.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s torchwcache[%(process)d] %(levelname)s %(message)s")
    if options.ready_fd is not None:
        return _detached(options.socket, options.ready_fd, options.idle_timeout)
    try:
        if options.foreground:
            server.run(options.socket, idle_timeout_s=options.idle_timeout)
        else:
            from torchwcache.daemon.supervisor import start_daemon

            start_daemon(options.socket, idle_timeout_s=options.idle_timeout)
    except (WeightCacheError, OSError) as error:
        print(f"torchwcache: {error}", file=sys.stderr)
        return 1
    return 0


def _detached(path: str, ready_fd: int, idle_timeout_s: float | None) -> int:
    """Serve as a child of init, and tell the starter through a pipe how it went: ``ready``, or class, pid and text of an error."""
    if os.fork():
        os._exit(0)
    # What a starter has blocked or ignored must not make the daemon deaf; the end of a terminal is none of its business.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log = logging.getLogger(__name__)
    with open(ready_fd, "wb", buffering=0) as starter:

        def ready() -> None:
            starter.write(b"ready\n")
            starter.close()

        try:
            server.run(path, on_ready=ready, idle_timeout_s=idle_timeout_s, warnings=shared_lifetime())
        except BrokenPipeError:
            # It waited no longer and has reported a failure: a daemon that comes up afterwards would be nobody's.
            log.error("whoever started this daemon has given up on it, exiting")
            return 1
        except (WeightCacheError, OSError) as error:
            log.error("%s", error)
            if not starter.closed:
                with contextlib.suppress(BrokenPipeError):
                    starter.write(f"{type(error).__name__}\n{getattr(error, 'pid', 0)}\n{error}".encode())
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
