"""Shard arithmetic: which part of a tensor, and of its block scales, belongs to one rank of a tensor-parallel layout."""

from __future__ import annotations

from collections.abc import Sequence

from torchwcache.errors import ConfigError

__all__ = ["scale_shape", "shard_scale_slices", "shard_slices"]


def shard_slices(shape: Sequence[int], *, dim: int, size: int, rank: int) -> tuple[slice, ...]:
    """The part of a tensor that one rank holds: an equal share along one dimension, everything along the others.

    Args:
        shape: Of the whole tensor.
        dim: The dimension that is split (0: column parallel, 1: row parallel, for ``nn.Linear``'s ``[out, in]`` weights).
        size: Number of ranks.
        rank: From 0 to ``size - 1``.

    Raises:
        ConfigError: There is no such dimension or rank, or it does not divide evenly.
    """
    if not 0 <= dim < len(shape):
        raise ConfigError(f"a tensor of shape {tuple(shape)} has no dimension {dim}")
    if not (size >= 1 and 0 <= rank < size):
        raise ConfigError(f"rank {rank} of {size}: need 0 <= rank < size")
    if shape[dim] % size:
        raise ConfigError(f"dimension {dim} of shape {tuple(shape)} does not divide into {size} equal parts")
    share = shape[dim] // size
    whole = [slice(0, n) for n in shape]
    whole[dim] = slice(rank * share, (rank + 1) * share)
    return tuple(whole)


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """Shape of the block scales of a weight: the last two dimensions counted in blocks, a ragged edge being a block of its own."""
    *batch, rows, columns = shape
    return (*batch, -(-rows // block[0]), -(-columns // block[1]))


def shard_scale_slices(shape: Sequence[int], block: Sequence[int], *, dim: int, size: int, rank: int) -> tuple[slice, ...]:
    """The part of a weight's block scales that goes with :func:`shard_slices` of the weight.

    Args:
        shape: Of the whole weight, two dimensions or more.
        block: Rows and columns of one block.
        dim: As for the weight.
        size: As for the weight.
        rank: As for the weight.

    Raises:
        ConfigError: As for the weight; or a shard would begin inside a block, whose one scale belongs to two ranks then.
    """
    part = shard_slices(shape, dim=dim, size=size, rank=rank)
    blocks = (1,) * (len(shape) - 2) + tuple(block)
    for axis, (span, step, length) in enumerate(zip(part, blocks, shape, strict=True)):
        if span.start % step or (span.stop % step and span.stop != length):
            raise ConfigError(
                f"rank {rank} of {size} would hold elements {span.start}..{span.stop} of dimension {axis} of shape {tuple(shape)}, "
                f"which does not begin and end with blocks of {step}: use fewer ranks"
            )
    return tuple(slice(span.start // step, -(-span.stop // step)) for span, step in zip(part, blocks, strict=True))
