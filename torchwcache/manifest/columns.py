"""Columns of integers, as they travel: a client reads them where they were received, and makes no objects of all of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, overload

import msgspec

__all__ = ["Column", "pack_column", "unpack_column"]

_FORMATS: dict[int, Literal["b", "h", "i", "q"]] = {1: "b", 2: "h", 4: "i", 8: "q"}
"""Of signed integers of so many bytes, as ``array`` and ``memoryview`` name them."""
_STEP = 1000


class Column(Sequence[int]):
    """Integers of at most 64 bits that stand for themselves, as a tuple of them would.

    Args:
        values: Kept in as few bytes each as the largest of them needs.

    Attributes:
        view: The same integers; quicker than this object where there are many.

    Raises:
        OverflowError: One has more than 64 bits.
    """

    __slots__ = ("view",)

    def __init__(self, values: Iterable[int] | memoryview = ()) -> None:
        if not isinstance(values, memoryview):
            values = list(values)
            least, most = min(values, default=0), max(values, default=0)
            width = next((n for n in _FORMATS if -(1 << 8 * n - 1) <= least and most < 1 << 8 * n - 1), 8)
            values = memoryview(array(_FORMATS[width], values))
        self.view: memoryview = values

    def __len__(self) -> int:
        return len(self.view)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Column: ...
    def __getitem__(self, index: int | slice) -> int | Column:
        found = self.view[index]
        return Column(found) if isinstance(found, memoryview) else found

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __eq__(self, other: object) -> bool:
        return self.view == other.view if isinstance(other, Column) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.view))

    def __reduce__(self) -> tuple[type[Column], tuple[list[int]]]:
        return Column, (self.view.tolist(),)

    def __repr__(self) -> str:
        return f"Column({self.view.tolist()})"

    def parts(self) -> Iterator[list[int]]:
        """All values, some at a time: a loop over such a list is the quickest, and takes no memory to speak of."""
        for start in range(0, len(self.view), _STEP):
            yield self.view[start : start + _STEP].tolist()


def pack_column(column: object) -> msgspec.msgpack.Ext:
    """For msgspec's ``enc_hook``: a column as an extension whose code is the number of bytes of each value.

    They are in the machine's own order: no manifest leaves the machine on which the memory is that it describes.

    Raises:
        NotImplementedError: This is no column.
    """
    if not isinstance(column, Column):
        raise NotImplementedError(f"a manifest holds no {type(column).__name__}")
    return msgspec.msgpack.Ext(column.view.itemsize, bytes(column.view))


def unpack_column(code: int, data: memoryview) -> Column:
    """For msgspec's ``ext_hook``: the column whose bytes these are, which it goes on using.

    Raises:
        ValueError: These are no whole integers.
    """
    if code not in _FORMATS:
        raise ValueError(f"integers of {code} bytes")
    if len(data) % code:
        raise ValueError(f"{len(data)} bytes are no whole number of integers of {code} bytes")
    return Column(data.cast(_FORMATS[code]))
