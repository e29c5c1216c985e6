"""Stop the daemon. What is attached stays usable; what is cached is gone."""

from __future__ import annotations

import argparse
import time

from torchwcache.cli.connection import add_socket_argument, connect, socket_path
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.errors import DaemonTimeoutError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_socket_argument(parser)
    parser.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="how long to wait for its end (default: 10)")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    with connect(args) as connection:
        connection.stop()
        deadline = time.monotonic() + args.timeout
        while connection.is_alive():
            if time.monotonic() > deadline:
                raise DaemonTimeoutError(
                    f"the daemon at {socket_path(args)} said that it stops, and has not within {args.timeout:g} s"
                )
            time.sleep(0.01)
    print("stopped")
    return ExitCode.OK
