"""The parser, and the one place that turns an exception into a line on standard error and an exit code."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Sequence

from torchwcache import __version__
from torchwcache.cli import daemon, demo, evict, load, status, stop, verify
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.errors import ConfigError, DaemonError, DaemonTimeoutError, DaemonUnavailable, EntryNotFoundError, WeightCacheError

__all__ = ["build_parser", "main"]

COMMANDS = (daemon, load, status, verify, evict, stop, demo)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="torchwcache",
        description="Keep finished models in memory that outlives every process, and attach them without copying.",
        epilog="Exit codes: " + ", ".join(f"{code.value} {code.meaning}" for code in ExitCode) + ".",
    )
    parser.add_argument("--version", action="version", version=f"torchwcache {__version__}")
    logs = argparse.ArgumentParser(add_help=False)
    logs.add_argument("-v", "--verbose", action="store_true", help="log what is being done; show tracebacks")
    logs.add_argument("--debug", action="store_true", help="log everything; show tracebacks")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        help_text = command.__doc__.strip().splitlines()[0] if command.__doc__ else ""
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=help_text, description=command.__doc__, parents=[logs])
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process when ``None``.
    """
    args = build_parser().parse_args(argv)
    talkative = args.verbose or args.debug
    _set_up_logging(logging.DEBUG if args.debug else logging.INFO if args.verbose else logging.WARNING)
    try:
        code: ExitCode = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError as error:
        if isinstance(error, WeightCacheError):
            return _report(error, talkative)
        # The reader of our output has gone (`| head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    except KeyboardInterrupt:
        print("torchwcache: interrupted", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except (WeightCacheError, OSError, MemoryError) as error:
        return _report(error, talkative)
    return code


def _report(error: BaseException, talkative: bool) -> ExitCode:
    if talkative:
        traceback.print_exception(error)
    print(f"torchwcache: {error}", file=sys.stderr)
    match error:
        case ConfigError():
            return ExitCode.USAGE
        case DaemonUnavailable() | DaemonTimeoutError():
            return ExitCode.NO_DAEMON
        case EntryNotFoundError():
            return ExitCode.NOT_FOUND
        case DaemonError() | _:
            return ExitCode.ERROR


def _set_up_logging(level: int) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("torchwcache", "torchwcache_nn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]  # not added to: main() may run more than once in a process
        logger.setLevel(level)
