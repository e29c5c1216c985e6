"""Remember digests of files between processes, keyed by the files' stat. Imports no torch.

The memo only saves work: whatever is wrong with it (unwritable, corrupt, not ours), the files are hashed again and a warning is
logged. A memo that somebody else could have written is never believed, since it decides which weights are served.
"""

from __future__ import annotations

import logging
import os
import stat as stat_bits
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

    from torchwcache.identity.checkpoint import StatIdentity

__all__ = ["Memo", "default_folder"]

_log = logging.getLogger(__name__)
_KEY = struct.Struct("<QQQqq")
_SCHEMA = "CREATE TABLE IF NOT EXISTS files (key BLOB PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID"
_BATCH = 500  # SQLite allows 999 parameters in one statement in old builds
_DIGEST_NBYTES = 16
_LOCK_TIMEOUT_S = 2.0


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/torchwcache``, or ``~/.cache/torchwcache``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "torchwcache"


class _Unusable(Exception):
    """Raised when the memo must not be used; its text is what the warning says."""


class Memo:
    """Digests of single files, in an SQLite file that any number of processes may use at once.

    Args:
        folder: A private folder (0700), made when the first digest is stored.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The database file. Its name carries the version of the digests in it."""
        folder = self._folder if self._folder is not None else default_folder()
        return folder / "checkpoints-2.sqlite3"

    def lookup(self, stats: Iterable[StatIdentity]) -> dict[StatIdentity, bytes]:
        """What is remembered of these files. Never raises: at worst nothing is remembered."""
        by_key = {_KEY.pack(*item): item for item in stats}
        keys = list(by_key)
        found: dict[StatIdentity, bytes] = {}
        with self._warnings("not read"):
            if not os.path.lexists(self.path):
                return found
            with self._connection() as db:
                for start in range(0, len(keys), _BATCH):
                    batch = keys[start : start + _BATCH]
                    marks = ",".join("?" * len(batch))
                    for key, digest in db.execute(f"SELECT key, digest FROM files WHERE key IN ({marks})", batch):
                        if isinstance(digest, bytes) and len(digest) == _DIGEST_NBYTES:
                            found[by_key[bytes(key)]] = digest
        return found

    def store(self, digests: Mapping[StatIdentity, bytes]) -> None:
        """Remember digests. The caller makes sure that each belongs to its stat. Never raises."""
        if not digests:
            return
        rows = [(_KEY.pack(*item), digest) for item, digest in digests.items()]
        with self._warnings("not written"):
            self._create()
            with self._connection() as db, db:
                db.executemany("INSERT OR REPLACE INTO files VALUES (?, ?)", rows)

    @contextmanager
    def _warnings(self, consequence: str) -> Iterator[None]:
        import sqlite3

        try:
            yield
        except (_Unusable, OSError, sqlite3.Error) as error:
            _log.warning(
                "%s: %s (%s); checkpoints are hashed again at every start until this is mended", self.path, error, consequence
            )
            # Exactly DatabaseError is SQLite's "not a database" and "malformed"; its subclasses are locks and full disks.
            # We own the file (checked before it was opened), nobody needs its content: make room for a new one.
            if type(error) is sqlite3.DatabaseError:
                self.path.unlink(missing_ok=True)

    def _create(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_folder()
        try:
            # Before SQLite does it, which would go by the umask.
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            return

    def _check_folder(self) -> None:
        folder = self.path.parent
        _check_owned(folder, os.lstat(folder), stat_bits.S_ISDIR, "a folder")

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        import sqlite3

        self._check_folder()
        _check_owned(self.path, os.lstat(self.path), stat_bits.S_ISREG, "a regular file")
        with closing(sqlite3.connect(self.path, timeout=_LOCK_TIMEOUT_S)) as db:
            db.execute(_SCHEMA)
            yield db


def _check_owned(path: Path, found: os.stat_result, is_kind: object, kind: str) -> None:
    assert callable(is_kind)
    if not is_kind(found.st_mode):
        raise _Unusable(f"{path} is not {kind}")
    if found.st_uid != os.geteuid():
        raise _Unusable(f"{path} belongs to user {found.st_uid}, not to us ({os.geteuid()})")
    if found.st_mode & 0o022:
        raise _Unusable(f"{path} can be written by others (mode {stat_bits.S_IMODE(found.st_mode):04o})")
