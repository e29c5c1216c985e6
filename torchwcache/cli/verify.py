"""Compare a cached entry with the checkpoint, by loading it once more: every tensor and every attribute."""

from __future__ import annotations

import argparse
import json

from torchwcache.cli.connection import add_socket_argument
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.model_arguments import add_model_arguments, model_config

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_arguments(parser)
    add_socket_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object: `equal` and `differences`")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    cfg = model_config(args)
    from torchwcache import WeightCache

    report = WeightCache.connect(socket=args.socket, mode="client").verify(cfg)
    differences = [str(difference) for difference in report.differences]
    if args.json:
        print(json.dumps({"equal": report.equal, "differences": differences}))
    else:
        print("equal" if report.equal else "\n".join([f"{len(differences)} differences", *(f"  {line}" for line in differences)]))
    return ExitCode.OK if report.equal else ExitCode.DIFFERENT
