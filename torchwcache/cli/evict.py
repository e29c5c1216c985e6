"""Free entries; those in use are freed when their last user goes."""

from __future__ import annotations

import argparse

from torchwcache.cli.connection import add_socket_argument, connect
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.humanize import size
from torchwcache.errors import ConfigError, EntryNotFoundError
from torchwcache.wire.client import DaemonConnection

__all__ = ["add_arguments", "run"]

_KEY_DIGITS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "key", nargs="?", metavar="KEY", help="an entry's key as `status` shows it, or an unambiguous beginning of it"
    )
    which.add_argument("--slot", help="every entry of this slot, as `status` shows it")
    which.add_argument("--all", action="store_true", help="every entry")
    parser.add_argument("--refusals", action="store_true", help="forget remembered refusals too, of KEY, of a slot, or all")
    add_socket_argument(parser)


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    with connect(args) as connection:
        key = _whole_key(connection, args.key) if args.key is not None else None
        evicted = connection.evict(key=key, slot=args.slot, everything=args.all, refusals=args.refusals)
    print(f"freed {len(evicted.freed)} ({size(evicted.nbytes)})")
    for pending in evicted.pending:
        print(f"{pending} is in use, and is freed when its last lease ends")
    return ExitCode.OK


def _whole_key(connection: DaemonConnection, beginning: str) -> str:
    if len(beginning) >= _KEY_DIGITS:
        return beginning
    found = sorted({entry.key for entry in connection.entries() if entry.key.startswith(beginning.lower())})
    if len(found) > 1:
        raise ConfigError(f"{beginning} is the beginning of {len(found)} keys: {', '.join(found)}")
    if not found:
        raise EntryNotFoundError(f"no key begins with {beginning}; `torchwcache status` lists them")
    return found[0]
