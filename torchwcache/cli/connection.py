"""What the commands that talk to a daemon have in common."""

from __future__ import annotations

import argparse
import os

from torchwcache.wire.address import default_socket_path
from torchwcache.wire.client import DaemonConnection

__all__ = ["add_socket_argument", "connect", "socket_path"]


def add_socket_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--socket``."""
    parser.add_argument(
        "--socket", metavar="PATH", help="the daemon's socket (default: TORCHWCACHE_SOCKET, else one fixed path per user)"
    )


def socket_path(args: argparse.Namespace) -> str:
    """The socket that is meant."""
    return os.path.abspath(os.path.expanduser(args.socket)) if args.socket else default_socket_path(os.environ)


def connect(args: argparse.Namespace) -> DaemonConnection:
    """Connect to the daemon that is meant; it is not started."""
    return DaemonConnection.connect(socket_path(args))
