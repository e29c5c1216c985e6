"""F1, D1: what counts as the same checkpoint, when the answer may be remembered, and when a change is noticed."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchwcache.config import Identity
from torchwcache.errors import CheckpointChangedError, CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from torchwcache.identity import checkpoint, hashing
from torchwcache.identity.checkpoint import CheckpointFiles, CheckpointIdentity, StatIdentity, hash_files, is_settled, stat_files
from torchwcache.identity.memo import Memo

SECOND = 1_000_000_000


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file look as if it had been untouched for a minute."""
    now = time.time_ns
    monkeypatch.setattr(checkpoint.time, "time_ns", lambda: now() + 60 * SECOND)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    for shard in ("a", "b"):
        save_file({f"{shard}.{i}": torch.full((8, 8), float(i)) for i in range(4)}, root / f"{shard}.safetensors")
    (root / "config.json").write_text("{}")
    return root


def files_of(root: Path) -> CheckpointFiles:
    return CheckpointFiles.in_folder(root, [path.name for path in root.iterdir()])


def change_one_tensor(path: Path) -> None:
    """Rewrite in place: same header, same size, same mtime; one byte of one tensor differs."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


# ---- F1: the same and not the same -------------------------------------------------------------------------------------------


def test_two_fine_tunes_with_equal_headers_differ(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "tuned")
    change_one_tensor(tmp_path / "tuned" / "b.safetensors")
    assert hash_files(files_of(folder)) != hash_files(files_of(tmp_path / "tuned"))


@pytest.mark.usefixtures("later")
def test_rewritten_in_place_with_size_and_mtime_kept_differs(folder: Path) -> None:
    files = files_of(folder)
    before = CheckpointIdentity(files).compute()
    assert CheckpointIdentity(files).remembered() == before
    change_one_tensor(folder / "a.safetensors")
    again = CheckpointIdentity(files)
    assert again.remembered() is None
    assert again.compute() != before


def test_copied_elsewhere_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    assert hash_files(files_of(folder)) == hash_files(files_of(copy))


def test_out_of_a_hugging_face_cache_is_the_same(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{number:064x}")
    assert hash_files(files_of(folder)) == hash_files(files_of(snapshot))


def test_a_single_file_may_be_renamed(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "a.safetensors", tmp_path / "other.st")
    one, other = CheckpointFiles.single(folder / "a.safetensors"), CheckpointFiles.single(tmp_path / "other.st")
    assert hash_files(one) == hash_files(other)


def test_names_within_a_folder_count(folder: Path) -> None:
    before = hash_files(files_of(folder))
    a, b = folder / "a.safetensors", folder / "b.safetensors"
    (folder / "x").write_bytes(a.read_bytes())
    a.unlink()
    b.rename(a)
    (folder / "x").rename(b)
    assert hash_files(files_of(folder)) != before


def test_where_one_file_ends_and_the_next_begins_counts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12")
    (tmp_path / "b").write_bytes(b"3")
    before = hash_files(files_of(tmp_path))
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"23")
    assert hash_files(files_of(tmp_path)) != before


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_the_number_of_threads_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(hashing, "LEAF_NBYTES", 10)
    monkeypatch.setattr(hashing, "_SPAN_NBYTES", 64)
    path = tmp_path / "file"
    path.write_bytes(os.urandom(size))
    found = {hash_files(CheckpointFiles.single(path), threads=threads) for threads in (1, 2, 5)}
    assert len(found) == 1
    if size:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        assert hash_files(CheckpointFiles.single(path)) not in found


def test_the_digest_is_what_it_was(tmp_path: Path) -> None:
    """It is on people's disks, in their memo: a change needs a new memo file name."""
    (tmp_path / "a").write_bytes(b"weights")
    assert hash_files(files_of(tmp_path)) == "1d443710fb3e1221bf266809f7fe8ccf"


# ---- remembering -------------------------------------------------------------------------------------------------------------


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> int:
        raise AssertionError(f"{path} was opened")

    monkeypatch.setattr(hashing, "open_file", refuse)


@pytest.mark.usefixtures("later")
def test_what_is_remembered_is_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CheckpointIdentity(files_of(folder))
    assert first.remembered() is None
    content = first.compute()
    no_reading(monkeypatch)
    assert CheckpointIdentity(files_of(folder)).remembered() == content
    assert CheckpointIdentity(files_of(folder)).compute() == content
    with pytest.raises(AssertionError, match="was opened"):  # the guard can fail
        CheckpointIdentity(files_of(folder), mode=Identity.REHASH).compute()


@pytest.mark.usefixtures("later")
def test_only_new_files_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CheckpointIdentity(files_of(folder)).compute()
    (folder / "c.safetensors").write_bytes(b"new")
    opened: list[str] = []
    real = hashing.open_file
    monkeypatch.setattr(hashing, "open_file", lambda path: opened.append(path.name) or real(path))
    content = CheckpointIdentity(files_of(folder)).compute()
    assert opened == ["c.safetensors"]
    assert content.hex == hash_files(files_of(folder))


def test_files_that_were_touched_just_now_are_neither_remembered_nor_keyed(folder: Path) -> None:
    identity = CheckpointIdentity(files_of(folder))
    identity.compute()
    assert identity.provisional() is None
    assert CheckpointIdentity(files_of(folder)).remembered() is None


@pytest.mark.parametrize("field", ["mtime_ns", "ctime_ns"])
def test_settled_means_both_times_are_old(field: str) -> None:
    old = StatIdentity(1, 2, 3, 0, 0)
    assert is_settled([old], 2 * SECOND + 1)
    assert not is_settled([old], 2 * SECOND)
    assert not is_settled([old, old._replace(**{field: SECOND})], 3 * SECOND)
    assert not is_settled([old._replace(**{field: 10 * SECOND})], 5 * SECOND)  # from the future: a clock that cannot be trusted


@pytest.mark.usefixtures("later")
def test_rehash_uses_neither_memo_nor_stat(folder: Path) -> None:
    CheckpointIdentity(files_of(folder)).compute()
    identity = CheckpointIdentity(files_of(folder), mode=Identity.REHASH)
    assert identity.remembered() is None
    assert identity.provisional() is None


@pytest.mark.usefixtures("later")
def test_rehash_sees_a_write_through_a_dirty_mapping(folder: Path) -> None:
    path = folder / "a.safetensors"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[-1] = 1  # from now on the page is dirty: the next write leaves no trace in the stat
        before = CheckpointIdentity(files_of(folder), mode=Identity.REHASH).compute()
        mapping[-1] = 2
        assert CheckpointIdentity(files_of(folder), mode=Identity.REHASH).compute() != before


@pytest.mark.usefixtures("later")
def test_provisional_keys_follow_the_stat(folder: Path) -> None:
    one, two = (CheckpointIdentity(files_of(folder)).provisional() for _ in range(2))
    assert one is not None
    assert one == two
    assert one.kind == "stat"
    change_one_tensor(folder / "a.safetensors")
    assert CheckpointIdentity(files_of(folder)).provisional() != one


# ---- the memo itself ---------------------------------------------------------------------------------------------------------

STAT = StatIdentity(1, 2**64 - 1, 3, -4, 5)
DIGEST = bytes(range(16))


def test_the_memo_is_private(private_cache: Path) -> None:
    Memo().store({STAT: DIGEST})
    assert stat.S_IMODE(private_cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(Memo().path.stat().st_mode) == 0o600
    assert Memo().path.parent == private_cache


def test_every_field_of_the_stat_is_part_of_the_key() -> None:
    Memo().store({STAT: DIGEST})
    assert Memo().lookup([STAT]) == {STAT: DIGEST}
    for field, value in zip(STAT._fields, STAT, strict=True):
        assert Memo().lookup([STAT._replace(**{field: value ^ 1})]) == {}


def test_many_files_at_once() -> None:
    stats = {STAT._replace(size=i): i.to_bytes(16, "big") for i in range(1200)}
    Memo().store(stats)
    assert Memo().lookup(stats) == stats


def damage(path: Path, how: str) -> None:
    match how:
        case "not a database":
            path.write_bytes(b"x" * 5000)
        case "truncated":
            os.truncate(path, path.stat().st_size // 2)
        case "another schema":
            path.unlink()
            with closing(sqlite3.connect(path)) as db:
                db.execute("CREATE TABLE files (a)")
            path.chmod(0o600)
        case "writable by others":
            path.chmod(0o622)
        case "folder writable by others":
            path.parent.chmod(0o770)
        case "symbolic link":
            path.rename(path.with_name("real"))
            path.symlink_to("real")
        case "folder is a link":
            path.parent.rename(path.parent.with_name("real"))
            path.parent.symlink_to("real")
        case "folder is a file":
            shutil.rmtree(path.parent)
            path.parent.write_text("")


MENDS_ITSELF = ("not a database",)


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize(
    "how",
    [
        *MENDS_ITSELF,
        "truncated",
        "another schema",
        "writable by others",
        "folder writable by others",
        "symbolic link",
        "folder is a link",
        "folder is a file",
    ],
)
def test_a_memo_that_cannot_be_trusted_is_ignored_with_a_warning(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    content = CheckpointIdentity(files_of(folder)).compute()
    damage(Memo().path, how)
    with caplog.at_level(logging.WARNING):
        again = CheckpointIdentity(files_of(folder))
        assert again.remembered() is None
        assert again.compute() == content
    assert "hashed again" in caplog.text
    if how in MENDS_ITSELF:
        assert CheckpointIdentity(files_of(folder)).remembered() == content


@pytest.mark.usefixtures("later")
def test_a_memo_of_another_user_is_not_believed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CheckpointIdentity(files_of(folder)).compute()
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    assert CheckpointIdentity(files_of(folder)).remembered() is None
    assert "belongs to user" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_memo_costs_only_the_memo(folder: Path, private_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    private_cache.parent.chmod(0o500)
    try:
        Memo().store({STAT: DIGEST})
    finally:
        private_cache.parent.chmod(0o700)
    assert "not written" in caplog.text


def test_many_processes_share_the_memo() -> None:
    script = (
        "import sys; from torchwcache.identity.memo import Memo; from torchwcache.identity.checkpoint import StatIdentity\n"
        "me = int(sys.argv[1])\n"
        "for i in range(20): Memo().store({StatIdentity(me, i, 0, 0, 0): bytes([me] * 16)})\n"
    )
    running = [subprocess.Popen([sys.executable, "-W", "error", "-c", script, str(me)], stderr=subprocess.PIPE) for me in range(4)]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, b"")
    stats = [StatIdentity(me, i, 0, 0, 0) for me in range(4) for i in range(20)]
    assert Memo().lookup(stats) == {item: bytes([item.dev] * 16) for item in stats}


# ---- changes and damage while reading ----------------------------------------------------------------------------------------


def while_reading(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    real = hashing._read
    pending = [action]

    def read(fd: int, path: Path, view: memoryview, offset: int) -> None:
        if pending:
            pending.pop()()
        real(fd, path, view, offset)

    monkeypatch.setattr(hashing, "_read", read)


@pytest.mark.parametrize("action", ["truncate", "append", "rewrite", "replace", "remove"])
def test_a_change_while_hashing_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    path = folder / "a.safetensors"

    def act() -> None:
        match action:
            case "truncate":
                os.truncate(path, 10)
            case "append":
                with path.open("ab") as file:
                    file.write(b"more")
            case "rewrite":
                change_one_tensor(path)
            case "replace":
                shutil.copy(path, folder / "new")
                (folder / "new").rename(path)
            case "remove":
                path.unlink()

    while_reading(monkeypatch, act)
    with pytest.raises(CheckpointChangedError, match=r"a\.safetensors"):
        CheckpointIdentity(files_of(folder), threads=1).compute()
    assert Memo().lookup(stat_files(files_of(folder))) == {}


def test_a_change_after_hashing_is_noticed_too(folder: Path) -> None:
    identity = CheckpointIdentity(files_of(folder))
    identity.compute()
    identity.check_unchanged()
    change_one_tensor(folder / "b.safetensors")
    with pytest.raises(CheckpointChangedError, match="ctime_ns"):
        identity.check_unchanged()


def test_a_file_that_ends_before_its_size_is_corrupt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing.os, "preadv", lambda *_: 0)
    with pytest.raises(CorruptCheckpointError, match="before its own size"):
        hash_files(files_of(folder))


def test_missing_and_strange_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="gone"):
        hash_files(CheckpointFiles.single(tmp_path / "gone"))
    os.mkfifo(tmp_path / "pipe")  # opening it would hang
    with pytest.raises(CorruptCheckpointError, match="not a regular file"):
        hash_files(CheckpointFiles.single(tmp_path / "pipe"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_says_so(folder: Path) -> None:
    (folder / "a.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match="cannot be read"):
        hash_files(files_of(folder))


def test_a_background_hash_gives_the_same_answer_and_can_be_given_up(folder: Path) -> None:
    with CheckpointIdentity(files_of(folder)) as identity:
        identity.start_background()
        assert identity.finish().hex == hash_files(files_of(folder))
    abandoned = CheckpointIdentity(files_of(folder))
    abandoned.start_background()
    abandoned.close()
    abandoned.close()
    assert abandoned.compute().hex == hash_files(files_of(folder))


def test_an_error_in_the_background_reaches_the_caller(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_reading(monkeypatch)
    identity = CheckpointIdentity(files_of(folder))
    identity.start_background()
    with pytest.raises(AssertionError, match="was opened"):
        identity.finish()


# ---- sampling ----------------------------------------------------------------------------------------------------------------


def test_sampling_is_marked_and_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.safetensors"
    save_file({"weight": torch.zeros(32 << 18)}, path)
    read: list[int] = []
    real = hashing._read
    monkeypatch.setattr(hashing, "_read", lambda fd, p, view, offset: read.append(len(view)) or real(fd, p, view, offset))
    files = CheckpointFiles.single(path)
    content = CheckpointIdentity(files, mode=Identity.SAMPLED).compute()
    assert content.kind == "sampled"
    assert content.hex != hash_files(files)
    assert sum(read[:20]) < path.stat().st_size / 10
    change_one_tensor(path)  # its last bytes are among the samples
    assert CheckpointIdentity(files, mode=Identity.SAMPLED).compute() != content


def test_sampling_reads_small_files_whole(folder: Path) -> None:
    before = CheckpointIdentity(files_of(folder), mode=Identity.SAMPLED).compute()
    change_one_tensor(folder / "a.safetensors")
    assert CheckpointIdentity(files_of(folder), mode=Identity.SAMPLED).compute() != before


@pytest.mark.usefixtures("later")
def test_sampling_is_never_remembered_as_full(folder: Path) -> None:
    CheckpointIdentity(files_of(folder), mode=Identity.SAMPLED).compute()
    assert CheckpointIdentity(files_of(folder)).remembered() is None
