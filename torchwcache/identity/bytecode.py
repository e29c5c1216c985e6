"""What a code object does, without where it was written. Imports no torch."""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Callable
from functools import lru_cache

__all__ = ["code_record", "global_names"]

_HAS_DOCSTRING = 0x4000000
"""``inspect.CO_HAS_DOCSTRING``, from Python 3.13 on."""
_GLOBAL_OPS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def code_record(code: types.CodeType, constant: Callable[[object], object]) -> object:
    """Everything in a code object that decides what it does: no file name, no line numbers.

    Args:
        code: The code.
        constant: Gives the canonical form of a constant (which may be another code object).
    """
    return (
        "code",
        code.co_qualname,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        code.co_code,  # as compiled: what the interpreter specialises while it runs does not show here
        code.co_exceptiontable,
        tuple(constant(item) for item in _constants(code)),
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
    )


def _constants(code: types.CodeType) -> tuple[object, ...]:
    """The constants, but for one that nothing reads: Python 3.14 leaves the first one that it met in its place."""
    constants = code.co_consts
    if not constants or sys.version_info < (3, 14) or code.co_flags & _HAS_DOCSTRING:
        return constants
    read = any(bytes((opcode, 0)) in code.co_code for opcode in dis.hasconst)
    return constants if read else (None, *constants[1:])


@lru_cache(maxsize=65536)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a code object, and the code nested in it, read; in the order of first use.

    ``co_names`` would also hold attribute names, which have nothing to do with globals of the same name.
    """
    names: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_OPS and isinstance(instruction.argval, str):
            names[instruction.argval] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(dict.fromkeys(global_names(constant)))
    return tuple(names)
