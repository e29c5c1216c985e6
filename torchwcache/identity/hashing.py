"""Hash files while they are loaded, from the memory that the load has just filled where that is possible. Imports no torch.

A file's digest is the xxh3-128 over its size (8 bytes, little endian) followed by the xxh3-128 digests (16 bytes each, in the
canonical big-endian form) of its leaves in their order. A leaf is 1 MiB of the file; the last one is what remains, and an empty
file has none. So leaves can be digested in any order and by any thread (xxhash and ``preadv`` both release the GIL), each of them
by whoever has its bytes in the cache of a core at the moment.

Files are read, not mapped: a file that is truncated meanwhile gives an error, where a mapping would give SIGBUS.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchwcache.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, FileLimitError

if TYPE_CHECKING:
    from torchwcache.identity.checkpoint import StatIdentity

__all__ = ["ContentHasher", "FileHash", "LEAF_NBYTES", "combine", "open_file", "sample_file"]

LEAF_NBYTES = 1 << 20
"""Part of the digest's definition: changing it changes every digest. So much stays in the second-level cache between being read
and being hashed."""
_SPAN_NBYTES = 64 << 20  # what one thread takes at a time, and what the kernel is told of beforehand
_QUIET_S = 0.1
_PARTIAL_LEAVES = 32
_SAMPLE_NBYTES = 64 << 10
_SAMPLES = 16
_SMALL_NBYTES = 4 << 20
_VERSION = b"torchwcache-checkpoint-2"


def combine(kind: str, items: Iterable[tuple[str, bytes]]) -> str:
    """Digest of named byte strings, as 32 hex digits; ``kind`` keeps different uses apart."""
    import xxhash

    digest = xxhash.xxh3_128(_VERSION + b"\0" + kind.encode() + b"\0")
    for name, data in items:
        raw = os.fsencode(name)
        digest.update(len(raw).to_bytes(8, "little") + raw + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def open_file(path: Path) -> int:
    """Open a file of a checkpoint for reading; the caller closes the descriptor.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FileLimitError: This process has no descriptors left.
        CheckpointError: The file cannot be read.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: no such file", path=str(path)) from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise FileLimitError(
                f"this process has no file descriptors left to open {path}: its limit is {limit} (`ulimit -n`; it may be raised to "
                f"{most})",
                path=str(path),
                limit=limit,
                needed=1,
            ) from error
        raise CheckpointError(f"{path}: cannot be read: {error}", path=str(path)) from error


def _read(fd: int, path: Path, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise CorruptCheckpointError(f"{path}: reading at byte {offset + done} failed: {error}", path=str(path)) from error
        if not count:
            raise CorruptCheckpointError(f"{path}: ends at byte {offset + done}, before its own size", path=str(path))
        done += count


def sample_file(path: Path, nbytes: int) -> bytes:
    """Digest of a file's size, start (a safetensors header included), end, and evenly spaced samples.

    Raises:
        CorruptCheckpointError: The file is shorter than ``nbytes``.
    """
    import xxhash

    digest = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
    fd = open_file(path)
    try:
        for start, stop in _sample_ranges(fd, path, nbytes):
            buffer = memoryview(bytearray(stop - start))
            _read(fd, path, buffer, start)
            digest.update(buffer)
    finally:
        os.close(fd)
    return digest.digest()


def _sample_ranges(fd: int, path: Path, nbytes: int) -> list[tuple[int, int]]:
    if nbytes <= _SMALL_NBYTES:
        return [(0, nbytes)]
    length = memoryview(bytearray(8))
    _read(fd, path, length, 0)
    header = 8 + int.from_bytes(length, "little")
    start = header if header <= min(nbytes, 100 << 20) else _SAMPLE_NBYTES
    step = (nbytes - start) // _SAMPLES
    spots = [start + i * step for i in range(_SAMPLES)] + [nbytes - _SAMPLE_NBYTES]
    return [(0, start), *((spot, min(spot + _SAMPLE_NBYTES, nbytes)) for spot in spots)]


class FileHash:
    """The leaves of one file, as far as they are known. Safe to use from any number of threads.

    Args:
        path: Where to read what did not pass by.
        nbytes: The file's size.
        passing: Leaves that pass by in parts, of all files.
    """

    def __init__(self, path: Path, nbytes: int, passing: PassingBytes) -> None:
        self.path, self.nbytes = path, nbytes
        self._passing = passing
        count = -(-nbytes // LEAF_NBYTES)
        self._digests = bytearray(16 * count)
        self._known = bytearray(count)

    def feed(self, offset: int, data: memoryview) -> None:
        """Take bytes that were just read from the file. In any order, also again, also overlapping.

        Args:
            offset: Of the first byte in the file.
            data: Contiguous bytes, used before this returns.

        Raises:
            ValueError: The bytes reach beyond the end of the file.
        """
        stop = offset + len(data)
        if offset < 0 or stop > self.nbytes:
            raise ValueError(f"{self.path}: bytes {offset} to {stop} lie outside a file of {self.nbytes} bytes")
        while offset < stop:
            leaf = offset // LEAF_NBYTES
            start, end = self.bounds(leaf)
            length = min(end, stop) - offset
            if not self._known[leaf]:
                if length == end - start:
                    self.digest_leaf(leaf, data[:length])
                else:
                    self._passing.add(self, leaf, offset - start, data[:length])
            offset, data = offset + length, data[length:]
        self._passing.noted_s = time.monotonic()

    def bounds(self, leaf: int) -> tuple[int, int]:
        """First byte of a leaf, and the one after its last."""
        start = leaf * LEAF_NBYTES
        return start, min(start + LEAF_NBYTES, self.nbytes)

    def digest_leaf(self, leaf: int, data: memoryview) -> None:
        """Take all bytes of a leaf."""
        import xxhash

        self.note(leaf, xxhash.xxh3_128_digest(data))

    def note(self, leaf: int, digest: bytes) -> None:
        """Note the digest of a leaf."""
        # The digest first: who sees the mark finds it.
        self._digests[16 * leaf : 16 * leaf + 16] = digest
        self._known[leaf] = 1
        self._passing.drop(self, leaf)

    def missing(self, start: int, stop: int) -> list[int]:
        """The leaves in a range of bytes that nobody has digested yet."""
        return [leaf for leaf in range(start // LEAF_NBYTES, -(-stop // LEAF_NBYTES)) if not self._known[leaf]]

    def digest(self) -> bytes:
        """The file's digest; every leaf must be known."""
        import xxhash

        assert all(self._known), self.path
        digest = xxhash.xxh3_128(self.nbytes.to_bytes(8, "little"))
        digest.update(self._digests)
        return digest.digest()


class _Partial:
    """A leaf of which only parts passed by so far."""

    __slots__ = ("_digest", "_later", "done", "lock")

    def __init__(self) -> None:
        import xxhash

        self.lock = threading.Lock()
        self.done = 0
        """So many bytes from the start of the leaf are in the digest."""
        self._digest = xxhash.xxh3_128()
        self._later: dict[int, bytes] = {}

    def add(self, start: int, data: memoryview) -> None:
        """Digest what continues the leaf, and keep a copy of what lies further on and is not kept already."""
        if start > self.done:
            self._keep(start, data)
            return
        self._continue(start, data)
        for start in sorted(self._later):
            if start > self.done:
                return
            self._continue(start, memoryview(self._later.pop(start)))

    def _keep(self, start: int, data: memoryview) -> None:
        # Only what no other part covers: together the copies are never larger than the leaf.
        position, stop = start, start + len(data)
        for other in sorted(self._later):
            if other >= stop:
                break
            if other > position:
                self._later[position] = bytes(data[position - start : other - start])
            position = max(position, other + len(self._later[other]))
        if position < stop:
            self._later[position] = bytes(data[position - start :])

    def _continue(self, start: int, data: memoryview) -> None:
        if start + len(data) > self.done:
            self._digest.update(data[self.done - start :])
            self.done = start + len(data)

    def digest(self) -> bytes:
        return self._digest.digest()


class PassingBytes:
    """When bytes passed by last, and leaves that pass by in parts: a tensor begins or ends within them, or several lie in one.

    Parts that come in order are digested as they come; others are copied, and wait for what lies before them. There are never
    more than ``_PARTIAL_LEAVES`` leaves of which parts wait, and never more than a leaf's size in each: beyond that the oldest
    leaf is given up, and read at the end like every leaf that did not pass by. The first leaf of each file is such a one, since
    nobody hands in the header.
    """

    def __init__(self) -> None:
        self.noted_s = time.monotonic()
        self._lock = threading.Lock()
        self._partial: dict[tuple[FileHash, int], _Partial] = {}

    def __len__(self) -> int:
        return len(self._partial)

    def add(self, file: FileHash, leaf: int, start: int, data: memoryview) -> None:
        """Add a part of a leaf that begins ``start`` bytes into it, and note the leaf's digest if it was the last one."""
        key = (file, leaf)
        first, end = file.bounds(leaf)
        with self._lock:
            partial = self._partial.get(key)
            if partial is None:
                if len(self._partial) >= _PARTIAL_LEAVES:
                    del self._partial[next(iter(self._partial))]
                partial = self._partial[key] = _Partial()
        with partial.lock:
            partial.add(start, data)
            digest = partial.digest() if partial.done == end - first else None
        if digest is not None:
            file.note(leaf, digest)

    def drop(self, file: FileHash, leaf: int) -> None:
        """Give up the parts of a leaf that is known now."""
        with self._lock:
            self._partial.pop((file, leaf), None)

    def clear(self) -> None:
        """Free the memory."""
        with self._lock:
            self._partial.clear()


class ContentHasher:
    """Hashes files: from what a load hands in while it reads, and in background threads whatever else there is.

    The threads stand back while a load hands in what it reads, since they would only read the same files again. They work when it
    does not, or not yet (an ``__init__`` that takes its time, a loader that reads by itself), and at the end.

    Args:
        files: Path by stat; the stat gives the size.
        known: Digests of other files, handed through for the caller.
        threads: How many; by default half the cores, at most four, so that the load itself keeps the other half.
    """

    def __init__(
        self,
        files: Mapping[StatIdentity, Path],
        *,
        known: Mapping[StatIdentity, bytes] | None = None,
        threads: int | None = None,
    ) -> None:
        self.known = dict(known or {})
        self._passing = PassingBytes()
        self._files = {item: FileHash(path, item.size, self._passing) for item, path in files.items()}
        spans = [(file, start) for file in self._files.values() for start in range(0, file.nbytes, _SPAN_NBYTES)]
        self._todo = iter(spans)
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._load_is_over = threading.Event()
        wanted = threads if threads is not None else min(4, max(1, (os.cpu_count() or 2) // 2))
        # Daemon threads: a process that is told to exit must not wait until terabytes are hashed.
        self._threads = [
            threading.Thread(target=self._work, name=f"torchwcache-hash-{i}", daemon=True) for i in range(min(wanted, len(spans)))
        ]

    def start(self) -> None:
        """Start the threads."""
        self._passing.noted_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def file(self, stat: StatIdentity) -> FileHash | None:
        """The file with this stat, if it is one that is being hashed, to hand in what is now read from it."""
        file = self._files.get(stat)
        if file is not None:
            self._passing.noted_s = time.monotonic()
        return file

    def result(self) -> dict[StatIdentity, bytes]:
        """Read what did not pass by, and return each file's digest.

        Raises:
            CheckpointError: What went wrong in a thread.
        """
        self._load_is_over.set()
        for thread in self._threads:
            thread.join()
        self._passing.clear()
        if self._error is not None:
            raise self._error
        return {item: file.digest() for item, file in self._files.items()}

    def close(self) -> None:
        """Tell the threads to stop, and wait for the few milliseconds that takes. Idempotent."""
        self._stop.set()
        self._load_is_over.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._passing.clear()

    def _work(self) -> None:
        try:
            buffer = memoryview(bytearray(LEAF_NBYTES))
            while not self._stop.is_set():
                with self._lock:
                    span = next(self._todo, None)
                if span is None:
                    return
                self._hash_span(*span, buffer)
        except BaseException as error:  # the top of a thread: kept for result(), which raises it
            self._error = error
            self._stop.set()

    def _stand_back(self) -> None:
        """Wait while the load hands in what it reads."""
        while not self._load_is_over.is_set():
            quiet_s = time.monotonic() - self._passing.noted_s
            if quiet_s >= _QUIET_S:
                return
            self._load_is_over.wait(_QUIET_S - quiet_s)

    def _hash_span(self, file: FileHash, start: int, buffer: memoryview) -> None:
        self._stand_back()
        stop = min(start + _SPAN_NBYTES, file.nbytes)
        missing = file.missing(start, stop)
        if not missing:
            return
        fd = open_file(file.path)
        try:
            # From a cold disk the kernel then reads this span in big pieces, ahead of us (and of the loader).
            first, end = file.bounds(missing[0])[0], file.bounds(missing[-1])[1]
            os.posix_fadvise(fd, first, end - first, os.POSIX_FADV_WILLNEED)
            for leaf in self._unknown(file, missing):
                first, end = file.bounds(leaf)
                piece = buffer[: end - first]
                _read(fd, file.path, piece, first)
                file.digest_leaf(leaf, piece)
        finally:
            os.close(fd)

    def _unknown(self, file: FileHash, leaves: list[int]) -> Iterator[int]:
        """Those of the leaves that still did not pass by when their turn comes."""
        for leaf in leaves:
            self._stand_back()
            if self._stop.is_set():
                return
            if file.missing(*file.bounds(leaf)):
                yield leaf
