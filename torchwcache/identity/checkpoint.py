"""Which bytes a checkpoint consists of. Imports no torch.

The content of a checkpoint is the xxh3-128 digest over every byte of every file that the loader opens, names included. Stat
identities are only keys for remembering it (``memo.py``) and for agreeing on one producer before anybody has read the files.
"""

from __future__ import annotations

import os
import stat as stat_bits
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchwcache.config import Identity
from torchwcache.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from torchwcache.identity.hashing import ContentHasher, FileHash, combine, sample_file
from torchwcache.identity.memo import Memo

__all__ = [
    "SETTLED_NS",
    "CheckpointFiles",
    "CheckpointIdentity",
    "Content",
    "StatIdentity",
    "hash_files",
    "is_settled",
    "stat_files",
    "stat_identity",
]

SETTLED_NS = 2_000_000_000
"""A file touched within this many nanoseconds may be touched again without a new time stamp (FAT and some NFS count in 2 s)."""


class StatIdentity(NamedTuple):
    """What the file system says about one file, symbolic links followed. Times are in nanoseconds."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, result: os.stat_result) -> StatIdentity:
        """Pick the identifying fields of a ``stat`` result."""
        return cls(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns)


class Content(NamedTuple):
    """An identity of a checkpoint's content, tagged with how it was established.

    ``full``: every byte was hashed. ``sampled``: headers and samples only. ``stat``: provisional, from the stat of the files; a
    key to agree on one producer, never one to publish under.
    """

    kind: Literal["full", "sampled", "stat"]
    hex: str


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files that a loader will open.

    Attributes:
        root: The folder that names are relative to, or ``None`` for a single file.
        files: ``(name, path)`` sorted by name. A single file that was given directly has the name ``""``: renamed, it is still
            the same content.
    """

    root: Path | None
    files: tuple[tuple[str, Path], ...]

    @classmethod
    def in_folder(cls, root: Path, names: Iterable[str]) -> CheckpointFiles:
        """Files of a folder, by their names relative to it."""
        return cls(root, tuple((name, root / name) for name in sorted(set(names))))

    @classmethod
    def single(cls, path: Path) -> CheckpointFiles:
        """One file on its own."""
        return cls(None, (("", path),))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths alone, in the order of the names."""
        return tuple(path for _, path in self.files)


def stat_files(files: CheckpointFiles) -> tuple[StatIdentity, ...]:
    """Stat every file, symbolic links followed.

    Raises:
        CheckpointNotFoundError: A file does not exist.
        CorruptCheckpointError: Something is there that is not a regular file.
    """
    return tuple(_stat_file(path) for path in files.paths)


def _stat_file(path: Path) -> StatIdentity:
    try:
        result = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{path}: no such file; the checkpoint is incomplete", path=str(path)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}", path=str(path)) from error
    if not stat_bits.S_ISREG(result.st_mode):
        raise CorruptCheckpointError(f"{path}: is not a regular file", path=str(path))
    return StatIdentity.of(result)


def is_settled(stats: Iterable[StatIdentity], now_ns: int) -> bool:
    """Whether every file was last changed so long ago that any later change must show in its time stamps."""
    return all(now_ns - max(item.mtime_ns, item.ctime_ns) > SETTLED_NS for item in stats)


def stat_identity(files: CheckpointFiles, stats: Sequence[StatIdentity]) -> str:
    """Digest of the names and stats of all files: the provisional key of a checkpoint that nobody has hashed yet."""
    items = ((name, repr(tuple(item)).encode()) for (name, _), item in zip(files.files, stats, strict=True))
    return combine("stat", items)


def hash_files(files: CheckpointFiles, *, threads: int | None = None) -> str:
    """Read every file once and return the digest of all bytes and names, as 32 hex digits.

    Raises:
        CheckpointChangedError: A file changed while it was being read.
        CheckpointNotFoundError: A file does not exist.
        CorruptCheckpointError: A file ends before the size that its stat gives.
    """
    return CheckpointIdentity(files, mode=Identity.REHASH, threads=threads).compute().hex


class CheckpointIdentity:
    """The identity of one checkpoint, from the first look at its files to the moment of publishing.

    The files' stat is taken once, when this object is made; everything it answers later is about the files as they were then.
    A client asks :meth:`remembered`; a producer that has to read anyway asks for the :meth:`provisional` key, calls
    :meth:`start_background`, loads, hands in what it reads to the file that :meth:`being_hashed` gives, and gets the digest from
    :meth:`finish`. Also a context manager: leaving it stops a hash that nobody waits for any more.

    Args:
        files: What the loader will open.
        mode: ``FULL``, ``REHASH`` (neither memo nor provisional key is used) or ``SAMPLED``.
        memo: Where digests are remembered; the user's own by default.
        threads: How many threads hash in the background.
    """

    def __init__(
        self,
        files: CheckpointFiles,
        *,
        mode: Identity = Identity.FULL,
        memo: Memo | None = None,
        threads: int | None = None,
    ) -> None:
        self.files = files
        self.mode = mode
        self._memo = memo if memo is not None else Memo()
        self._threads = threads
        # The clock is read first: a file that changes between here and the stat then looks younger, never older.
        self._now_ns = time.time_ns()
        self._stats = stat_files(files)
        self._hasher: ContentHasher | None = None
        self._content: Content | None = None

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(item.size for item in self._stats)

    def remembered(self) -> Content | None:
        """The content, when it is known without reading the files: hashed before, and no file's stat changed since."""
        if self._content is not None:
            return self._content
        if self.mode is not Identity.FULL:
            return None
        known = self._memo.lookup(self._stats)
        if len(known) < len(set(self._stats)):
            return None
        return self._combined([known[item] for item in self._stats])

    def provisional(self) -> Content | None:
        """A key from the files' stat, or ``None`` when the stat cannot be relied on: :meth:`compute` first, then."""
        if self.mode is not Identity.FULL or not is_settled(self._stats, self._now_ns):
            return None
        return Content("stat", stat_identity(self.files, self._stats))

    def compute(self) -> Content:
        """Establish the content now, reading what is not remembered.

        Raises:
            CheckpointChangedError: A file changed since this object was made.
            CorruptCheckpointError: A file is shorter than its stat says.
        """
        if self._content is None and self.mode is Identity.SAMPLED:
            digests = [sample_file(path, item.size) for path, item in zip(self.files.paths, self._stats, strict=True)]
            self.check_unchanged()
            self._content = self._combined(digests)
        if self._content is None:
            self.start_background()
        return self.finish()

    def start_background(self) -> None:
        """Start hashing in background threads, if the content is not known and no hash is running."""
        if self._content is not None or self._hasher is not None or self.mode is Identity.SAMPLED:
            return
        known = self._memo.lookup(self._stats) if self.mode is Identity.FULL else {}
        todo = {item: path for path, item in zip(self.files.paths, self._stats, strict=True) if item not in known}
        self._hasher = ContentHasher(todo, known=known, threads=self._threads)
        self._hasher.start()

    def being_hashed(self, fd: int) -> FileHash | None:
        """The file behind an open descriptor, to hand in bytes that are now read from it: those need not be read again.

        ``None`` when there is nothing to hand in: no hash is under way, the file's digest is known, it is none of the
        checkpoint's, or it is not as it was when this object was made.
        """
        # Asked anew for each read: a number is soon that of another file.
        return None if self._hasher is None else self._hasher.file(StatIdentity.of(os.fstat(fd)))

    def finish(self) -> Content:
        """Read what did not pass by, check that no file changed meanwhile, remember the result, and return it.

        Raises:
            CheckpointChangedError: A file changed since this object was made.
            CorruptCheckpointError: A file is shorter than its stat says.
        """
        if self._content is not None:
            return self._content
        if self._hasher is None:
            return self.compute()
        hasher, self._hasher = self._hasher, None
        try:
            fresh = hasher.result()
        except CorruptCheckpointError:
            self.check_unchanged()  # a file that shrank under our hands has changed; it was not corrupt before
            raise
        self.check_unchanged()
        digests = hasher.known | fresh
        self._content = self._combined([digests[item] for item in self._stats])
        if self.mode is Identity.FULL:
            self._memo.store({item: digest for item, digest in digests.items() if is_settled([item], self._now_ns)})
        return self._content

    def check_unchanged(self) -> None:
        """Compare the files' stat with the first look.

        Raises:
            CheckpointChangedError: A file changed, or went away.
        """
        for path, before in zip(self.files.paths, self._stats, strict=True):
            try:
                after = _stat_file(path)
            except CheckpointError as error:
                raise CheckpointChangedError(
                    f"{path}: went away while the checkpoint was being read; nothing was published", path=str(path)
                ) from error
            if after != before:
                changed = [name for name, a, b in zip(before._fields, before, after, strict=True) if a != b]
                raise CheckpointChangedError(
                    f"{path}: changed while the checkpoint was being read ({', '.join(changed)}); nothing was published. "
                    "Wait until whoever writes the checkpoint is done, and start again",
                    path=str(path),
                )

    def close(self) -> None:
        """Stop a hash that is still running. Idempotent."""
        if self._hasher is not None:
            self._hasher.close()
            self._hasher = None

    def __enter__(self) -> CheckpointIdentity:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _combined(self, digests: Sequence[bytes]) -> Content:
        kind: Literal["full", "sampled"] = "sampled" if self.mode is Identity.SAMPLED else "full"
        items = (
            (name, item.size.to_bytes(8, "little") + digest)
            for (name, _), item, digest in zip(self.files.files, self._stats, digests, strict=True)
        )
        return Content(kind, combine(kind, items))
