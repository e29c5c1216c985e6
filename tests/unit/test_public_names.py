"""The public names and the command line's options, as reviewable lists: a change here is a change for users."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata

import pytest

import torchwcache
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.main import build_parser

NAMES = {
    "Access",
    "AttachReport",
    "Attachment",
    "BuildError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "DaemonError",
    "DaemonUnavailable",
    "DetachedError",
    "FingerprintError",
    "Identity",
    "MismatchError",
    "Mode",
    "ModelConfig",
    "Parallelism",
    "Policy",
    "RankError",
    "RebindError",
    "RefusedError",
    "Role",
    "UnsupportedQuantizationError",
    "WeightCache",
    "WeightCacheError",
    "__version__",
}
"""The other errors are public too, in ``torchwcache.errors``."""

MODEL = {
    "--adapter", "--build", "--build-kwargs", "--build-meta", "--code-version", "--device", "--dtype", "--finalize", "--identity",
    "--loader", "--no-strict", "--override", "--quantization", "--revision", "--role", "--seed", "--trust-remote-code",
    "CHECKPOINT",
}  # fmt: skip
COMMON = {"--debug", "--help", "--verbose", "-h", "-v"}
COMMANDS = {
    "daemon": {*COMMON, "--foreground", "--idle-timeout", "--socket"},
    "load": {*COMMON, *MODEL, "--json", "--socket", "--timeout"},
    "status": {*COMMON, "--json", "--socket"},
    "verify": {*COMMON, *MODEL, "--deep", "--inputs", "--json", "--socket", "--timeout"},
    "evict": {*COMMON, "--all", "--refusals", "--slot", "--socket", "KEY"},
    "stop": {*COMMON, "--socket", "--timeout"},
    "demo": {*COMMON, "--tiny"},
}
EXIT_CODES = {"OK": 0, "ERROR": 1, "USAGE": 2, "NO_DAEMON": 3, "DIFFERENT": 4, "NOT_FOUND": 5, "INTERRUPTED": 130}


def test_public_names() -> None:
    assert set(torchwcache.__all__) == NAMES
    assert len(torchwcache.__all__) == len(NAMES)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_name_is_there(name: str) -> None:
    value = getattr(torchwcache, name)
    assert name in dir(torchwcache)
    if isinstance(value, type):
        assert value.__name__ == name
        assert value.__doc__


def test_one_version() -> None:
    assert torchwcache.__version__ == metadata.version("torchwcache")


def test_star_import_gives_them_all() -> None:
    found: dict[str, object] = {}
    exec("from torchwcache import *", found)
    assert set(found) - {"__builtins__"} == NAMES


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="WeightCahce"):
        torchwcache.WeightCahce  # noqa: B018


def test_names_are_lazy() -> None:
    code = "import sys, torchwcache; assert 'torchwcache.cache' not in sys.modules; print(torchwcache.ModelConfig('x').checkpoint)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "x\n"


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in (action.option_strings or [str(action.metavar)])}


def test_command_line() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert {name: options_of(parser) for name, parser in commands.choices.items()} == COMMANDS
    assert options_of(build_parser()) == {"-h", "--help", "--version", "COMMAND"}


def test_exit_codes() -> None:
    assert {code.name: code.value for code in ExitCode} == EXIT_CODES
