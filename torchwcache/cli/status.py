"""Show the daemon and what it holds."""

from __future__ import annotations

import argparse
import json

from torchwcache.cli.connection import add_socket_argument, connect
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.humanize import duration, size
from torchwcache.wire.messages import DaemonStatus, EntryInfo

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: `daemon` and `entries`")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    with connect(args) as connection:
        status, entries = connection.status(), connection.entries()
    if args.json:
        from msgspec.structs import asdict

        print(json.dumps({"daemon": asdict(status), "entries": [asdict(entry) for entry in entries]}))
    else:
        print("\n".join([*_daemon_lines(status), *_entry_lines(entries)]))
    return ExitCode.OK


def _daemon_lines(status: DaemonStatus) -> list[str]:
    lines = [
        f"daemon {status.version} (protocol {status.protocol}), pid {status.pid}, up {duration(status.uptime_s)}, {status.socket}",
        f"{status.entries} entries, {size(status.nbytes)}, {status.leases} leases, {status.producing} producing, "
        f"{status.waiting} waiting, {status.refusals} refusals, {status.fds} of {status.fd_limit} descriptors",
    ]
    return lines + [f"warning: {text}" for text in status.warnings]


def _entry_lines(entries: tuple[EntryInfo, ...]) -> list[str]:
    if not entries:
        return []
    head = ("KEY", "SIZE", "SEGMENTS", "LEASES", "HITS", "AGE", "IDLE", "MODEL", "SLOT")
    rows = [head, *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return ["", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)]


def _row(entry: EntryInfo) -> tuple[str, ...]:
    return (
        entry.key,
        size(entry.nbytes),
        str(entry.segments),
        str(entry.leases),
        str(entry.hits),
        duration(entry.age_s),
        duration(entry.idle_s),
        entry.label + (" (superseded)" if entry.superseded else ""),
        entry.slot,
    )
