"""What can be looked up is complete: every error, every command, every option."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from torchwcache import errors
from torchwcache.cli.main import COMMANDS, build_parser

DOCS = Path(__file__).resolve().parents[2] / "docs"


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_explained(name: str) -> None:
    assert re.search(rf"^### {name}$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    docstring = getattr(errors, name).__doc__
    assert docstring.startswith(("Raised when", "Base of"))


def test_no_error_is_explained_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (\w+)$", (DOCS / "errors.md").read_text(), re.MULTILINE)) == set(errors.__all__)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_command_and_option_is_explained(command: object) -> None:
    name = command.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    text = (DOCS / "cli.md").read_text()
    assert re.search(rf"^## {name}$", text, re.MULTILINE)
    missing = [option for option in options_of(subparsers()[name]) if f"{option}" not in text]
    assert missing == []
