"""What a command's exit code says."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """Exit codes, for scripts."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> ExitCode:
        """A code with its meaning, for ``--help``."""
        code = int.__new__(cls, value)
        code._value_ = value
        code.meaning = meaning
        return code

    OK = 0, "done"
    ERROR = 1, "failed"
    USAGE = 2, "wrong arguments or configuration"
    NO_DAEMON = 3, "no daemon answers"
    DIFFERENT = 4, "the compared models differ"
    NOT_FOUND = 5, "no such entry"
    INTERRUPTED = 130, "interrupted"
