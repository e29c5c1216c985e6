"""D1: a file's digest is the same whoever reads it: a load in whatever order, pieces and threads, or the hash by itself."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from torchwcache.hashed_reads import HashedReads
from torchwcache.identity import hashing
from torchwcache.identity.checkpoint import CheckpointFiles, CheckpointIdentity, Content, StatIdentity
from torchwcache.memory import host
from torchwcache.memory.host import HostMemory

LEAF = 64


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "LEAF_NBYTES", LEAF)
    monkeypatch.setattr(host, "_SEEN_NBYTES", LEAF)
    monkeypatch.setattr(hashing, "_SPAN_NBYTES", 3 * LEAF)
    monkeypatch.setattr(hashing, "_PARTIAL_LEAVES", 3)


def plain_digest(data: bytes) -> bytes:
    """As the module's docstring has it, in the fewest words."""
    leaves = [xxhash.xxh3_128(data[i : i + LEAF]).digest() for i in range(0, len(data), LEAF)]
    return xxhash.xxh3_128(len(data).to_bytes(8, "little") + b"".join(leaves)).digest()


def plain_content(name: str, data: bytes) -> str:
    item = (name, len(data).to_bytes(8, "little") + plain_digest(data))
    return hashing.combine("full", [item])


@st.composite
def files_and_reads(draw: st.DrawFn) -> tuple[bytes, list[tuple[int, int]]]:
    """A file's bytes and ``(offset, length)`` of reads: with holes, overlaps and repetitions; or all of it, shuffled."""
    size = draw(st.one_of(st.integers(0, 10 * LEAF), st.sampled_from([LEAF - 1, LEAF, LEAF + 1, 4 * LEAF])))
    data = draw(st.randoms(use_true_random=False)).randbytes(size)
    if not size:
        return data, []
    if draw(st.booleans()):
        cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=12))})
        pieces = [(start, stop - start) for start, stop in itertools.pairwise(cuts)]
        return data, draw(st.permutations(pieces))
    starts = st.integers(0, size - 1)
    reads = draw(st.lists(starts.flatmap(lambda at: st.tuples(st.just(at), st.integers(0, size - at))), max_size=20))
    return data, reads


class Reading:
    """A checkpoint of one file, and a load that reads parts of it in several threads."""

    def __init__(self, data: bytes, folder: Path) -> None:
        self.path = folder / "file"
        self.path.write_bytes(data)
        self.identity = CheckpointIdentity(CheckpointFiles.single(self.path), threads=2)
        self.reads = HashedReads(HostMemory(), self.identity)

    def run(self, reads: list[tuple[int, int]], *, threads: int = 1) -> None:
        data = self.path.read_bytes()
        failures: list[str] = []
        with self.path.open("rb") as file:

            def work(mine: list[tuple[int, int]]) -> None:
                for offset, length in mine:
                    target = torch.zeros(length, dtype=torch.uint8)
                    self.reads.read_file(file.fileno(), offset, target)
                    if bytes(target.tolist()) != data[offset : offset + length]:
                        failures.append(f"{offset}, {length}")

            started = [threading.Thread(target=work, args=(reads[i::threads],)) for i in range(threads)]
            for thread in started:
                thread.start()
            for thread in started:
                thread.join()
        assert failures == []


@given(what=files_and_reads(), threads=st.integers(1, 4))
def test_the_digest_is_that_of_a_plain_read(what: tuple[bytes, list[tuple[int, int]]], threads: int) -> None:
    data, reads = what
    with tempfile.TemporaryDirectory() as folder:
        reading = Reading(data, Path(folder))
        with reading.identity as identity:
            identity.start_background()
            reading.run(reads, threads=threads)
            assert identity.finish() == Content("full", plain_content("", data))


@given(what=files_and_reads())
def test_what_passed_by_is_not_read_again(what: tuple[bytes, list[tuple[int, int]]]) -> None:
    data, reads = what
    again: list[int] = []

    def read(fd: int, path: Path, view: memoryview, offset: int) -> None:
        again.append(offset // LEAF)
        assert os.preadv(fd, [view], offset) == len(view)

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(hashing, "_read", read):
        with mock.patch.object(hashing, "_PARTIAL_LEAVES", 100), mock.patch.object(hashing, "_QUIET_S", 60.0):
            reading = Reading(data, Path(folder))
            with reading.identity as identity:
                identity.start_background()
                reading.run(reads)
                assert again == []
                identity.finish()
        passed = {i for offset, length in reads for i in range(offset, offset + length)}
        missed = {i // LEAF for i in range(len(data)) if i not in passed}
    assert sorted(again) == sorted(missed)


@given(what=files_and_reads(), wrong=st.data())
def test_other_bytes_give_another_digest(what: tuple[bytes, list[tuple[int, int]]], wrong: st.DataObject) -> None:
    """What is hashed is what was handed in, not what the file holds now."""
    data, _ = what
    if not data:
        return
    position = wrong.draw(st.integers(0, len(data) - 1))
    cut = wrong.draw(st.integers(0, len(data)))
    bad = bytearray(data)
    bad[position] ^= 1 << wrong.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(data)
        stat = StatIdentity.of(path.stat())
        hasher = hashing.ContentHasher({stat: path}, threads=1)
        file = hasher.file(stat)
        assert file is not None
        for start, stop in ((0, cut), (cut, len(data))):
            file.feed(start, memoryview(bad)[start:stop])
        hasher.start()
        assert hasher.result() == {stat: plain_digest(bytes(bad))} != {stat: plain_digest(data)}


@given(size=st.integers(0, 5 * LEAF), offset=st.integers(-10, 6 * LEAF), length=st.integers(1, 3 * LEAF))
def test_bytes_from_beyond_the_end_are_refused(size: int, offset: int, length: int) -> None:
    file = hashing.FileHash(Path("file"), size, hashing.PassingBytes())
    if offset >= 0 and offset + length <= size:
        file.feed(offset, memoryview(bytes(length)))
        return
    with pytest.raises(ValueError, match="lie outside a file"):
        file.feed(offset, memoryview(bytes(length)))


@given(parts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(1, LEAF - 10)), max_size=60))
def test_few_leaves_wait_for_their_other_parts(parts: list[tuple[int, int, int]]) -> None:
    passing = hashing.PassingBytes()
    file = hashing.FileHash(Path("file"), 41 * LEAF, passing)
    for leaf, start, length in parts:
        file.feed(leaf * LEAF + start, memoryview(bytes(length)))
        assert len(passing) <= 3
        assert sum(len(data) for part in passing._partial.values() for data in part._later.values()) <= 3 * LEAF
