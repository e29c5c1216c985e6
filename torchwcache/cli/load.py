"""Load a checkpoint into the cache, so that the first process that attaches it finds it there."""

from __future__ import annotations

import argparse
import json

from torchwcache.cli.connection import add_socket_argument
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.model_arguments import add_model_arguments, model_config
from torchwcache.cli.report import report_lines
from torchwcache.config import Mode, mode_from
from torchwcache.errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    add_socket_argument(parser)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="how long to wait for another producer")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    cfg = model_config(args)
    if mode_from(None) is Mode.OFF:
        raise ConfigError("TORCHWCACHE_MODE is off: nothing would be cached; unset it for this command")
    from torchwcache import WeightCache

    # The one purpose is that the entry is there afterwards: what an engine would take as a reason to load from disk is an error.
    attachment = WeightCache.attach(
        cfg, socket=args.socket, on_unavailable="error", on_refused="error", on_mismatch="load", timeout_s=args.timeout
    )
    with attachment:
        report = attachment.report.as_dict()
        print(json.dumps(report) if args.json else "\n".join(report_lines(report)))
    return ExitCode.OK
