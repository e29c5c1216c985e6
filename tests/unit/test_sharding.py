"""Shards cover a tensor exactly once, and take their block scales along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from torchwcache.errors import ConfigError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.loaders.safetensors_file import SafetensorsCheckpoint
from torchwcache.loaders.sharding import scale_shape, shard_scale_slices, shard_slices


@given(
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    shares=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.integers(1, 4),
    dim=st.integers(0, 1),
)
def test_shards_cover_a_weight_and_its_scales_exactly_once(
    blocks: tuple[int, int], shares: tuple[int, int], size: int, dim: int
) -> None:
    shape = [blocks[0] * shares[0], blocks[1] * shares[1]]
    shape[dim] *= size
    weight = torch.zeros(shape, dtype=torch.int64)
    scales = torch.zeros(scale_shape(shape, blocks), dtype=torch.int64)
    for rank in range(size):
        part = shard_slices(shape, dim=dim, size=size, rank=rank)
        scale_part = shard_scale_slices(shape, blocks, dim=dim, size=size, rank=rank)
        weight[part] += 1
        scales[scale_part] += 1
        assert tuple(scales[scale_part].shape) == scale_shape(weight[part].shape, blocks)
    assert bool((weight == 1).all())
    assert bool((scales == 1).all())


def test_a_ragged_edge_is_a_block_of_its_own() -> None:
    assert scale_shape((200, 130), (128, 128)) == (2, 2)
    assert scale_shape((4, 200, 130), (128, 128)) == (4, 2, 2)
    assert shard_scale_slices((200, 130), (128, 128), dim=0, size=1, rank=0) == (slice(0, 2), slice(0, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (4, 4), "dim": 2, "size": 2, "rank": 0}, "no dimension 2"),
        ({"shape": (4, 4), "dim": 0, "size": 2, "rank": 2}, "rank 2 of 2"),
        ({"shape": (4, 4), "dim": 0, "size": 0, "rank": 0}, "rank 0 of 0"),
        ({"shape": (5, 4), "dim": 0, "size": 2, "rank": 0}, "equal parts"),
    ],
)
def test_what_cannot_be_split(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_slices(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_cuts_a_block_is_refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="blocks of 128"):
        shard_scale_slices((384, 128), (128, 128), dim=0, size=2, rank=rank)


def test_shards_are_read_from_a_file_by_name(tmp_path: Path) -> None:
    weight = torch.arange(48.0).view(6, 8)
    save_file({"w": weight}, tmp_path / "model.safetensors")
    with SafetensorsCheckpoint(CheckpointFiles.single(tmp_path / "model.safetensors")) as checkpoint:
        for dim, size in ((0, 3), (1, 2)):
            parts = [checkpoint.read_slice("w", shard_slices((6, 8), dim=dim, size=size, rank=rank)) for rank in range(size)]
            assert torch.equal(torch.cat(parts, dim=dim), weight)
