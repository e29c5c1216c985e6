"""One difference between two module states, and the comparison of what is shared. Imports no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Difference", "partition_differences"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing in which two modules differ: where, what, and both values in words."""

    path: str
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}: expected {self.expected}, found {self.found}"


def partition_differences(paths: Sequence[str], a: Sequence[Hashable], b: Sequence[Hashable], what: str) -> Iterator[Difference]:
    """Places that are one and the same on one side must be so on the other.

    Args:
        paths: The places that both sides have.
        a: For each, something that is equal for the same thing, on the expected side.
        b: The same on the other side; only which ones are equal to each other counts.
        what: For the report.
    """
    first_a: dict[Hashable, int] = {}
    first_b: dict[Hashable, int] = {}
    for i, path in enumerate(paths):
        x, y = first_a.setdefault(a[i], i), first_b.setdefault(b[i], i)
        if x != y:
            yield Difference(path, what, paths[x] if x != i else "no other", paths[y] if y != i else "no other")
