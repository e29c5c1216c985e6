"""The ranks of one engine, as far as the cache needs them: they tell each other how far they got, and wait for no one forever."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torchwcache.errors import RankError

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["GridRanks", "OneRank", "ProcessGroupRanks", "RankGroup"]

_WORD_NBYTES = 2048


class RankGroup(Protocol):
    """All ranks that load one model together: every tensor, pipeline and expert rank, without data-parallel replicas.

    Attributes:
        rank: This process's number among them.
        size: How many there are.
    """

    rank: int
    size: int

    def exchange(self, word: str, what: str) -> Sequence[str]:
        """Tell all ranks a word and hear theirs, in the order of the ranks. All ranks must call it, in the same order.

        Args:
            word: A short text.
            what: What is being agreed on, for the error.

        Raises:
            RankError: A rank is gone, or did not come within the bound.
        """


class OneRank:
    """An engine of one process."""

    rank = 0
    size = 1

    def exchange(self, word: str, what: str) -> Sequence[str]:
        """Hear oneself."""
        return (word,)


class ProcessGroupRanks:
    """Ranks that share a ``torch.distributed`` process group for host memory (gloo).

    Args:
        group: A group whose backend takes CPU tensors; it is only used, never made or destroyed.
        timeout_s: How long one rank waits for the slowest. A rank that *died* is noticed at once, since its connections close.
    """

    def __init__(self, group: torch.distributed.ProcessGroup, *, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self.rank, self.size = group.rank(), group.size()

    def exchange(self, word: str, what: str) -> Sequence[str]:
        """One all-gather of short texts, as bytes: nothing is pickled."""
        import torch
        import torch.distributed as dist

        data = word.encode()[: _WORD_NBYTES - 2]
        mine = torch.zeros(_WORD_NBYTES, dtype=torch.uint8)
        mine[:2] = torch.tensor([len(data) // 256, len(data) % 256], dtype=torch.uint8)
        mine[2 : 2 + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            with torch.inference_mode(mode=False), torch.no_grad():
                work = dist.all_gather(theirs, mine, group=self._group, async_op=True)
                work.wait(datetime.timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} of {self.size}: another rank is gone, or did not come within {self._timeout_s:.0f} s, while all "
                f"had to agree on {what} ({str(error).splitlines()[0]}); look at the other ranks' logs"
            ) from error
        return tuple(_text(item.tolist()) for item in theirs)


class GridRanks:
    """Ranks of a grid, where there is a group for each row and one for each column, but none for all (vLLM with data parallelism).

    Args:
        inner: The row of this rank: the fastest running axis.
        outer: Its column.
    """

    def __init__(self, inner: RankGroup, outer: RankGroup) -> None:
        self._inner, self._outer = inner, outer
        self.rank, self.size = outer.rank * inner.size + inner.rank, outer.size * inner.size

    def exchange(self, word: str, what: str) -> Sequence[str]:
        """First along the rows, then each row's words along the columns."""
        row = self._inner.exchange(word, what)
        columns = [self._outer.exchange(other, what) for other in row]
        return tuple(column[place] for place in range(self._outer.size) for column in columns)


def _text(data: list[int]) -> str:
    return bytes(data[2 : 2 + data[0] * 256 + data[1]]).decode(errors="replace")
