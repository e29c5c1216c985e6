"""A module of any number of tensors for GPU benchmarks, made and filled where it lives, and a check that finds a wrong tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

WIDTH = 1024
_ENDS, _WHOLE = 4096, 64


class Weight(nn.Module):
    """One matrix. Nothing is initialized: building 92,000 of them is not what is measured."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=torch.bfloat16), requires_grad=False)


class Stack(nn.Module):
    """A plain module of ``count`` equal matrices, each in a module of its own, as layers and experts are."""

    def __init__(self, count: int, rows: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weight(rows, width) for _ in range(count))

    def weights(self) -> list[torch.Tensor]:
        return [layer.weight.data for layer in self.layers]


def stack_kwargs(*, tensors: int, nbytes: int) -> dict[str, int]:
    """Arguments of a :class:`Stack` of so many bfloat16 tensors and about so many bytes."""
    return {"count": tensors, "rows": max(1, round(nbytes / tensors / 2 / WIDTH)), "width": WIDTH}


def stack_nbytes(kwargs: dict[str, int]) -> int:
    return kwargs["count"] * kwargs["rows"] * kwargs["width"] * 2


def code_of(number: int) -> int:
    """The 32 bits that tensor ``number`` is full of: other ones for each tensor, and a finite number as bfloat16 or float32."""
    number += 1
    return (number >> 14) << 16 | number & 0x3FFF


def make_live(kwargs: dict[str, int], device: str, *, random: bool = False) -> Stack:
    """A stack in ordinary memory of a device, one plain allocation a tensor."""
    with torch.device(device):
        model = Stack(**kwargs).eval()
    for number, weight in enumerate(model.weights()):
        if random:
            weight.normal_(std=0.02)
        else:
            weight.view(torch.int32).fill_(code_of(number))
    return model


def check(weights: Sequence[torch.Tensor], kwargs: dict[str, int]) -> int:
    """Compare both ends of up to 4,096 tensors, and 64 of them whole, with what they were filled with.

    Returns:
        How many tensors were looked at.

    Raises:
        AssertionError: A tensor is not what it was: a time for it would say nothing.
    """
    assert len(weights) == kwargs["count"], f"{len(weights)} tensors instead of {kwargs['count']}"
    shape = (kwargs["rows"], kwargs["width"])
    wrong = [i for i, weight in enumerate(weights) if tuple(weight.shape) != shape or weight.device.type == "meta"]
    assert not wrong, f"tensors {wrong[:10]} have another shape or no memory"
    numbers = _spread(len(weights), _ENDS)
    ends = torch.cat([part for i in numbers for part in (weights[i].view(-1)[:2], weights[i].view(-1)[-2:])]).view(torch.int32)
    expected = torch.tensor([code_of(i) for i in numbers], dtype=torch.int32, device=ends.device).repeat_interleave(2)
    wrong = [numbers[at // 2] for at in (ends != expected).nonzero().flatten().tolist()]
    assert not wrong, f"tensors {wrong[:10]} hold other values than were published"
    wrong = [i for i in _spread(len(weights), _WHOLE) if not bool((weights[i].view(torch.int32) == code_of(i)).all())]
    assert not wrong, f"tensors {wrong[:10]} hold other values in the middle than were published"
    return len(numbers)


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` indices, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
