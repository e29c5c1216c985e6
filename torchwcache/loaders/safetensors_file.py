"""Read tensors, whole or in slices, from one or many safetensors files. See https://huggingface.co/docs/safetensors#format.

Data is read with ``preadv``, never through a mapping: a file that is truncated while it is read gives an error, not SIGBUS.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from torchwcache.errors import CheckpointError, CorruptCheckpointError
from torchwcache.identity.checkpoint import CheckpointFiles
from torchwcache.identity.hashing import open_file
from torchwcache.loaders.shards import read_index

__all__ = ["Piece", "ReadFile", "SafetensorsCheckpoint", "TensorInfo", "read_into_memory"]

ReadFile: TypeAlias = Callable[[int, int, torch.Tensor], None]
"""``Memory.read_file``: fills a contiguous tensor from a file descriptor at an offset."""

_PIECE_NBYTES = 16 << 20
_SHORT_ROW_NBYTES = 256 << 10
_MAX_HEADER_NBYTES = 100_000_000  # the library's own limit

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32,
    "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
"""safetensors' names of dtypes. Sub-byte ones are absent: their shapes count elements that torch cannot address."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies.

    Attributes:
        dtype: Of its elements.
        shape: Its dimensions.
        shard: Index of its file among the checkpoint's shards.
        offset: Of its first byte in that file.
        nbytes: Its length in bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


def read_into_memory(fd: int, offset: int, target: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor from a file.

    Raises:
        EOFError: The file ends before the tensor is full.
    """
    nbytes = target.numel() * target.element_size()
    # Not ``numpy()``: torch does not require it, and it knows neither bfloat16 nor float8.
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(target.data_ptr())).cast("B") if nbytes else memoryview(b"")
    while len(view):
        count = os.preadv(fd, [view[: 1 << 30]], offset)
        if not count:
            raise EOFError(f"file ends at byte {offset}, {len(view)} bytes early")
        view, offset = view[count:], offset + count


class SafetensorsCheckpoint:
    """The tensors of a checkpoint, by name. Owns open file descriptors: a context manager, with an idempotent ``close()``.

    Args:
        files: A single file; or shards, with an index or without.

    Raises:
        CheckpointNotFoundError: A file is missing.
        CorruptCheckpointError: A file is truncated or malformed, two shards hold one name, or the index is wrong.
    """

    def __init__(self, files: CheckpointFiles) -> None:
        self._stack = ExitStack()
        self._fds: list[int] = []
        self._paths: list[Path] = []
        self._tensors: dict[str, TensorInfo] = {}
        try:
            for name, path in files.files:
                if not name or name.endswith(".safetensors"):
                    self._add(path)
            for name, path in files.files:
                if name.endswith(".index.json"):
                    self._check_index(path)
        except BaseException:
            self.close()
            raise

    def names(self) -> tuple[str, ...]:
        """All names, in the order in which the tensors lie in the files."""
        return tuple(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor.

        Raises:
            CheckpointError: There is no such tensor.
        """
        try:
            return self._tensors[name]
        except KeyError as error:
            raise CheckpointError(f"{self._described()}: holds no tensor {name!r}", name=name) from error

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold tensors."""
        return tuple(self._paths)

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor into ordinary memory.

        Raises:
            CorruptCheckpointError: The file ends early.
        """
        info = self.info(name)
        target = torch.empty(info.shape, dtype=info.dtype)
        self.read_into(name, target)
        return target

    def read_slice(self, name: str, slices: Sequence[slice]) -> torch.Tensor:
        """Read a part of a tensor, such as one rank's share. Only the rows that are needed are read from the file.

        Args:
            name: The tensor.
            slices: One per dimension, from the first on; steps must be 1. Dimensions that are not given are taken whole.
        """
        info = self.info(name)
        if len(slices) > len(info.shape) or any(item.step not in (None, 1) for item in slices):
            raise ValueError(f"{name}: {list(slices)} does not slice a tensor of shape {list(info.shape)} in steps of 1")
        bounds = [item.indices(size)[:2] for item, size in zip(slices, info.shape, strict=False)]
        bounds += [(0, size) for size in info.shape[len(bounds) :]]
        target = torch.empty([max(0, stop - start) for start, stop in bounds], dtype=info.dtype)
        if target.numel():
            for run in _runs(target, info.shape, bounds, info.offset, info.dtype.itemsize):
                Piece(self, info.shard, run, info.dtype, read_into_memory)()
        return target

    def read_into(self, name: str, target: torch.Tensor, read_file: ReadFile = read_into_memory) -> None:
        """Copy a tensor into an existing one of the same shape, converting its dtype as ``copy_`` does.

        A contiguous target of the same dtype is filled in place, without a second copy; anything else in bounded pieces.

        Raises:
            CorruptCheckpointError: The file ends early.
        """
        for work in self.plan(name, target, read_file):
            work()

    def plan(self, name: str, target: torch.Tensor, read_file: ReadFile = read_into_memory) -> Iterator[Piece]:
        """Split :meth:`read_into` into pieces that may run in any order, and in different threads."""
        info = self.info(name)
        if tuple(target.shape) != info.shape:
            raise ValueError(f"{name}: a tensor of shape {list(info.shape)} cannot be read into one of {list(target.shape)}")
        target = target.detach()
        if info.nbytes == 0:
            return
        if target.dtype == info.dtype and target.is_contiguous() and not target.is_conj() and not target.is_neg():
            flat = target.view(-1).view(torch.uint8)
            start = 0
            while start < info.nbytes:
                # Cut at round places of the file, whose pages, and leaves of whose hash, are then read by one thread.
                stop = min(start + _PIECE_NBYTES - (info.offset + start) % _PIECE_NBYTES, info.nbytes)
                part = flat[start:stop]
                yield Piece(self, info.shard, _Run(part, info.offset + start, tuple(part.shape)), torch.uint8, read_file)
                start = stop
            return
        bounds = [(0, size) for size in info.shape]
        for run in _runs(target, info.shape, bounds, info.offset, info.dtype.itemsize):
            yield Piece(self, info.shard, run, info.dtype, read_file)

    def same_bytes(self, name: str, other: str) -> bool:
        """Whether two tensors have equal dtype, shape and bytes."""
        one, two = self.info(name), self.info(other)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        for start in range(0, one.nbytes, _PIECE_NBYTES):
            length = min(_PIECE_NBYTES, one.nbytes - start)
            pair = [torch.empty(length, dtype=torch.uint8) for _ in range(2)]
            for info, buffer in zip((one, two), pair, strict=True):
                Piece(self, info.shard, _Run(buffer, info.offset + start, (length,)), torch.uint8, read_into_memory)()
            if not torch.equal(*pair):
                return False
        return True

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._stack.close()

    def __enter__(self) -> SafetensorsCheckpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _described(self) -> str:
        return str(self._paths[0]) if len(self._paths) == 1 else f"{self._paths[0].parent} ({len(self._paths)} shards)"

    def _add(self, path: Path) -> None:
        fd = open_file(path)
        self._stack.callback(os.close, fd)
        shard = len(self._fds)
        self._fds.append(fd)
        self._paths.append(path)
        for name, info in _read_header(fd, path, shard):
            if name in self._tensors:
                other = self._paths[self._tensors[name].shard].name
                raise CorruptCheckpointError(
                    f"{path}: holds {name!r}, and so does {other}. If both belong to different checkpoints, give the file itself",
                    path=str(path),
                )
            self._tensors[name] = info

    def _check_index(self, index: Path) -> None:
        weight_map = read_index(index)
        for name, shard in weight_map.items():
            info = self._tensors.get(name)
            if info is None or self._paths[info.shard] != index.parent / shard:
                raise CorruptCheckpointError(
                    f"{index.parent / shard}: does not hold {name!r}, which {index.name} says it does",
                    path=str(index.parent / shard),
                )

    def _fill(self, shard: int, run: _Run, dtype: torch.dtype, read_file: ReadFile) -> None:
        part = run.part
        try:
            if part.dtype == dtype and part.is_contiguous() and tuple(part.shape) == run.shape:
                read_file(self._fds[shard], run.offset, part)
            else:
                scratch = torch.empty(run.shape, dtype=dtype)
                # ``read_file`` fills memory on the target's device only.
                (read_file if part.device == scratch.device else read_into_memory)(self._fds[shard], run.offset, scratch)
                part.copy_(scratch[(slice(None), *run.inner)] if run.inner else scratch)
        except EOFError as error:
            path = self._paths[shard]
            raise CorruptCheckpointError(f"{path}: was truncated while it was being read: {error}", path=str(path)) from error
        except OSError as error:
            path = self._paths[shard]
            raise CorruptCheckpointError(f"{path}: reading at byte {run.offset} failed: {error}", path=str(path)) from error


@dataclass(frozen=True, slots=True)
class _Run:
    """Whole rows that lie together in a file, and the part of the target that they fill.

    ``inner`` cuts the last dimensions of what was read, where only a part of each row is wanted.
    """

    part: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    inner: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one thread can read on its own, by calling it."""

    checkpoint: SafetensorsCheckpoint
    shard: int
    run: _Run
    dtype: torch.dtype
    read_file: ReadFile

    @property
    def nbytes(self) -> int:
        """Bytes that it reads."""
        return prod(self.run.shape) * self.dtype.itemsize

    def __call__(self) -> None:
        """Read."""
        with torch.no_grad():
            self.checkpoint._fill(self.shard, self.run, self.dtype, self.read_file)


def _runs(
    target: torch.Tensor, shape: Sequence[int], bounds: Sequence[tuple[int, int]], offset: int, itemsize: int
) -> Iterator[_Run]:
    """Cut the wanted part of a tensor into runs of a bounded size."""
    if not shape:
        yield _Run(target, offset, ())
        return
    (start, stop), row = bounds[0], prod(shape[1:]) * itemsize
    whole = all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True))
    # Long rows are cut one by one, so that no more is read than is wanted; short ones are read together and cut afterwards.
    if len(shape) > 1 and (row > _PIECE_NBYTES or (not whole and row > _SHORT_ROW_NBYTES)):
        for i in range(start, stop):
            yield from _runs(target[i - start], shape[1:], bounds[1:], offset + i * row, itemsize)
        return
    step = max(1, _PIECE_NBYTES // max(1, row))
    inner = () if whole else tuple(slice(*bound) for bound in bounds[1:])
    for first in range(start, stop, step):
        last = min(first + step, stop)
        yield _Run(target[first - start : last - start], offset + first * row, (last - first, *shape[1:]), inner)


def _read_header(fd: int, path: Path, shard: int) -> Iterator[tuple[str, TensorInfo]]:
    """Let the library judge the header, then read the offsets, which it does not tell."""
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, _MAX_HEADER_NBYTES):
        raise CorruptCheckpointError(f"{path}: is not a safetensors file, or is truncated ({size} bytes)", path=str(path))
    try:
        with safe_open(path, framework="pt"):  # checks that the tensors cover the file exactly, without gap or overlap
            pass
        header: dict[str, Any] = json.loads(os.pread(fd, length, 8))
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"{path}: is truncated, corrupt, or not a safetensors file: {error}", path=str(path)
        ) from error
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise CheckpointError(f"{path}: {name!r} has dtype {entry['dtype']}, which this loader does not read", path=str(path))
        shape = tuple(entry["shape"])
        if prod(shape) * dtype.itemsize != stop - start or 8 + length + stop > size:
            raise CorruptCheckpointError(f"{path}: {name!r} lies outside the file", path=str(path))
        yield name, TensorInfo(dtype, shape, shard, 8 + length + start, stop - start)
