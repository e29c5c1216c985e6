"""Hash files fast enough to do it during a load. Imports no torch.

A file's digest is the xxh3-128 over its size and the xxh3-128 digests of its 64 MiB chunks, so that several threads can work on
one file (xxhash and ``preadv`` both release the GIL). Files are read, not mapped: a file that is truncated meanwhile gives an
error, where a mapping would give SIGBUS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchwcache.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError

if TYPE_CHECKING:
    from torchwcache.identity.checkpoint import StatIdentity

__all__ = ["CHUNK_NBYTES", "ContentHasher", "combine", "sample_file"]

CHUNK_NBYTES = 64 << 20
"""The unit of work of one thread. Part of the digest's definition: changing it changes every digest."""
_BUFFER_NBYTES = 1 << 20  # stays in the second-level cache between being read and being hashed
_SAMPLE_NBYTES = 64 << 10
_SAMPLES = 16
_SMALL_NBYTES = 4 << 20
_VERSION = b"torchwcache-checkpoint-1"


def combine(kind: str, items: Iterable[tuple[str, bytes]]) -> str:
    """Digest of named byte strings, as 32 hex digits; ``kind`` keeps different uses apart."""
    import xxhash

    digest = xxhash.xxh3_128(_VERSION + b"\0" + kind.encode() + b"\0")
    for name, data in items:
        raw = os.fsencode(name)
        digest.update(len(raw).to_bytes(8, "little") + raw + len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(f"{path}: no such file", path=str(path)) from error
    except OSError as error:
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
    fd = _open(path)
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


class ContentHasher:
    """Hashes files in background threads.

    Args:
        files: ``(path, size)``.
        known: Digests of other files, handed through for the caller.
        threads: How many; by default half the cores, at most four, so that the load itself keeps the other half.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        *,
        known: Mapping[StatIdentity, bytes] | None = None,
        threads: int | None = None,
    ) -> None:
        self.known = dict(known or {})
        self._sizes = dict(files)
        chunks = [(path, start) for path, size in self._sizes.items() for start in range(0, size, CHUNK_NBYTES)]
        self._todo = iter(chunks)
        self._digests: dict[tuple[Path, int], bytes] = {}
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        wanted = threads if threads is not None else min(4, max(1, (os.cpu_count() or 2) // 2))
        # Daemon threads: a process that is told to exit must not wait until terabytes are hashed.
        self._threads = [
            threading.Thread(target=self._work, name=f"torchwcache-hash-{i}", daemon=True) for i in range(min(wanted, len(chunks)))
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def result(self) -> dict[Path, bytes]:
        """Wait, and return each file's digest.

        Raises:
            CheckpointError: What went wrong in a thread.
        """
        import xxhash

        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        found: dict[Path, bytes] = {}
        for path, size in self._sizes.items():
            digest = xxhash.xxh3_128(size.to_bytes(8, "little"))
            for start in range(0, size, CHUNK_NBYTES):
                digest.update(self._digests[path, start])
            found[path] = digest.digest()
        return found

    def close(self) -> None:
        """Tell the threads to stop, and wait for the few milliseconds that takes. Idempotent."""
        self._stop.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _work(self) -> None:
        try:
            buffer = memoryview(bytearray(_BUFFER_NBYTES))
            while not self._stop.is_set():
                with self._lock:
                    chunk = next(self._todo, None)
                if chunk is None:
                    return
                self._digests[chunk] = self._hash_chunk(*chunk, buffer)
        except BaseException as error:  # the top of a thread: kept for result(), which raises it
            self._error = error
            self._stop.set()

    def _hash_chunk(self, path: Path, start: int, buffer: memoryview) -> bytes:
        import xxhash

        digest = xxhash.xxh3_128()
        stop = min(start + CHUNK_NBYTES, self._sizes[path])
        fd = _open(path)
        try:
            # From a cold disk the kernel then reads this chunk in big pieces, ahead of us (and of the loader).
            os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_WILLNEED)
            for offset in range(start, stop, len(buffer)):
                if self._stop.is_set():
                    break
                piece = buffer[: min(len(buffer), stop - offset)]
                _read(fd, path, piece, offset)
                digest.update(piece)
        finally:
            os.close(fd)
        return digest.digest()
