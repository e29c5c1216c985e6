"""Start the daemon, and return when it answers."""

from __future__ import annotations

import argparse
import logging

from torchwcache.cli.connection import add_socket_argument, connect, socket_path
from torchwcache.cli.exit_codes import ExitCode

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_socket_argument(parser)
    parser.add_argument("--foreground", action="store_true", help="stay in the foreground, and log to standard error")
    parser.add_argument(
        "--idle-timeout", type=float, metavar="SECONDS", help="exit after so long without a client (default: never)"
    )


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    path = socket_path(args)
    if args.foreground:
        from torchwcache.daemon import server

        logger = logging.getLogger("torchwcache")
        logger.setLevel(min(logger.level, logging.INFO))
        server.run(path, idle_timeout_s=args.idle_timeout)
        return ExitCode.OK
    from torchwcache.daemon.supervisor import start_daemon

    start_daemon(path, idle_timeout_s=args.idle_timeout)
    with connect(args) as connection:
        print(f"started, pid {connection.status().pid}, {path}")
    return ExitCode.OK
