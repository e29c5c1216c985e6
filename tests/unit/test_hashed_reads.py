"""D1: the first load's own reads are what is hashed; nothing is read twice, and nothing else is ever taken for the file."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from torchwcache.adapter import LoadContext
from torchwcache.config import Identity, ModelConfig
from torchwcache.errors import CheckpointChangedError, FileLimitError
from torchwcache.hashed_reads import HashedReads
from torchwcache.identity import hashing
from torchwcache.identity.checkpoint import CheckpointFiles, CheckpointIdentity, hash_files
from torchwcache.loaders.registry import LOADERS
from torchwcache.loaders.safetensors import SafetensorsLoader
from torchwcache.memory.base import Seen
from torchwcache.memory.host import HostMemory

MIB = 1 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(3 * MIB // 4 + 5))
        self.small = nn.ParameterList(nn.Parameter(torch.zeros(1000 + i)) for i in range(300))
        self.last = nn.Parameter(torch.zeros(MIB))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards of large and small tensors, 8 MiB in all."""
    folder = tmp_path / "model"
    folder.mkdir()
    torch.manual_seed(0)
    state = {name: torch.randn_like(tensor) for name, tensor in Net().state_dict().items()}
    names = sorted(state)
    save_file({name: state[name] for name in names[:150]}, folder / "a.safetensors")
    save_file({name: state[name] for name in names[150:]}, folder / "b.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def second_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Which leaves the hash had to read by itself, with background threads that never grow impatient."""
    found: list[tuple[str, int]] = []
    real = hashing._read

    def read(fd: int, path: Path, view: memoryview, offset: int) -> None:
        found.append((path.name, offset // hashing.LEAF_NBYTES))
        real(fd, path, view, offset)

    monkeypatch.setattr(hashing, "_read", read)
    monkeypatch.setattr(hashing, "_QUIET_S", 60.0)
    return found


def context(read_file: Callable[[int, int, torch.Tensor], None]) -> LoadContext:
    return LoadContext(
        allocate=lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8),
        expect=lambda sizes: None,
        read_file=read_file,
        progress=lambda done, total: None,
    )


def identity_of(cfg: ModelConfig, mode: Identity = Identity.FULL) -> CheckpointIdentity:
    loader = LOADERS.get("safetensors")
    assert isinstance(loader, SafetensorsLoader)
    return CheckpointIdentity(loader.files(cfg), mode=mode)


def load(cfg: ModelConfig, identity: CheckpointIdentity, read_file: Callable[..., None] | None = None) -> nn.Module:
    reads = HashedReads(HostMemory(), identity)
    return LOADERS.get("safetensors").load(cfg, context(read_file or reads.read_file)).module


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_only_headers_are_read_a_second_time(checkpoint: Path, dtype: str | None, second_reads: list[tuple[str, int]]) -> None:
    cfg = ModelConfig(checkpoint, build=Net, dtype=dtype)
    with identity_of(cfg) as identity:
        identity.start_background()
        module = load(cfg, identity)
        assert second_reads == []
        found = identity.finish()
    assert sorted(second_reads) == [("a.safetensors", 0), ("b.safetensors", 0), ("config.json", 0)]
    assert found.hex == hash_files(LOADERS.get("safetensors").files(cfg))
    assert module.large.float().abs().sum() > 0


def test_a_loader_that_reads_by_itself_is_hashed_in_the_background(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the load to end."""
    monkeypatch.setattr(hashing, "_QUIET_S", 0.01)
    cfg = ModelConfig(checkpoint, build=Net)
    with identity_of(cfg) as identity:
        identity.start_background()
        hasher = identity._hasher
        assert hasher is not None
        for thread in hasher._threads:
            thread.join(30)
            assert not thread.is_alive()
        assert not hasher._load_is_over.is_set()
        assert identity.finish().hex == hash_files(LOADERS.get("safetensors").files(cfg))


def test_what_the_background_has_hashed_already_may_pass_by_again(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_QUIET_S", 0.0)
    cfg = ModelConfig(checkpoint, build=Net)
    with identity_of(cfg) as identity:
        identity.start_background()
        load(cfg, identity)
        assert identity.finish().hex == hash_files(LOADERS.get("safetensors").files(cfg))


@pytest.mark.parametrize("action", ["rewrite", "append", "truncate", "replace"])
def test_a_change_during_the_load_is_noticed(checkpoint: Path, action: str) -> None:
    cfg = ModelConfig(checkpoint, build=Net)
    path = checkpoint / "b.safetensors"
    lock, calls = threading.Lock(), 0
    with identity_of(cfg) as identity:
        identity.start_background()
        reads = HashedReads(HostMemory(), identity)

        def read_file(fd: int, offset: int, target: torch.Tensor) -> None:
            nonlocal calls
            reads.read_file(fd, offset, target)
            with lock:
                calls += 1
                if calls == 100:
                    change(path, action)

        load(cfg, identity, read_file)
        with pytest.raises(CheckpointChangedError, match=r"b\.safetensors"):
            identity.check_unchanged()
        with pytest.raises(CheckpointChangedError, match=r"b\.safetensors"):
            identity.finish()


def change(path: Path, action: str) -> None:
    """Beyond what the load reads, so that only the stat tells."""
    match action:
        case "rewrite":
            with path.open("r+b") as file:
                first = file.read(1)
                file.seek(0)
                file.write(first)
        case "append":
            with path.open("ab") as file:
                file.write(b"more")
        case "truncate":
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size)  # to the size it has: the times change
        case "replace":
            shutil.copy(path, path.with_name("new"))
            path.with_name("new").rename(path)


def test_a_descriptor_is_looked_at_anew_each_time(checkpoint: Path, tmp_path: Path) -> None:
    """The number of a closed file is soon that of another one, whose bytes must not count as the first one's."""
    path, other = checkpoint / "a.safetensors", tmp_path / "other"
    other.write_bytes(os.urandom(path.stat().st_size))
    files = CheckpointFiles.single(path)
    with CheckpointIdentity(files) as identity:
        identity.start_background()
        reads, numbers = HashedReads(HostMemory(), identity), set()
        target = torch.zeros(path.stat().st_size, dtype=torch.uint8)
        for which, start in ((path, MIB), (other, 0), (path, 3 * MIB), (other, MIB)):
            with which.open("rb") as file:
                numbers.add(file.fileno())
                reads.read_file(file.fileno(), start, target[: MIB // 2])
        assert len(numbers) == 1
        assert identity.finish().hex == hash_files(files)


def test_a_file_that_was_replaced_before_the_load_opened_it_is_not_taken_for_the_first_one(checkpoint: Path) -> None:
    path = checkpoint / "a.safetensors"
    with CheckpointIdentity(CheckpointFiles.single(path)) as identity:
        identity.start_background()
        change(path, "replace")
        with path.open("rb") as file:
            assert identity.being_hashed(file.fileno()) is None


def test_nothing_is_handed_in_where_nothing_is_hashed(checkpoint: Path) -> None:
    path = checkpoint / "a.safetensors"
    for mode in (Identity.SAMPLED, Identity.FULL):
        with CheckpointIdentity(CheckpointFiles.single(path), mode=mode) as identity, path.open("rb") as file:
            assert identity.being_hashed(file.fileno()) is None
            if mode is Identity.FULL:
                identity.start_background()
                assert identity.being_hashed(file.fileno()) is not None
                identity.finish()
            assert identity.being_hashed(file.fileno()) is None


def test_errors_are_the_memorys_own(checkpoint: Path) -> None:
    path = checkpoint / "a.safetensors"
    size = path.stat().st_size
    files = CheckpointFiles.single(path)
    with CheckpointIdentity(files) as identity, path.open("rb") as file:
        identity.start_background()
        reads = HashedReads(HostMemory(), identity)
        with pytest.raises(EOFError):
            reads.read_file(file.fileno(), size - 10, torch.zeros(11, dtype=torch.uint8))
        with pytest.raises(ValueError, match="contiguous"):
            reads.read_file(file.fileno(), 0, torch.zeros(8, dtype=torch.uint8)[::2])
        reads.read_file(file.fileno(), 0, torch.zeros(0))
        assert identity.finish().hex == hash_files(files)


class ElsewhereMemory:
    """A memory of another device: bytes go there through a block of host memory, and are shown to whoever wants to see them."""

    def __init__(self, *, shows: bool) -> None:
        self.shows = shows
        self.calls: list[tuple[int, int]] = []

    def read_file(self, fd: int, offset: int, target: torch.Tensor, seen: Seen | None = None) -> None:
        self.calls.append((offset, target.numel()))
        if seen is not None and self.shows:
            seen(offset, memoryview(os.pread(fd, target.numel(), offset)))


@pytest.mark.parametrize("shows", [True, False])
def test_what_goes_to_another_device_is_hashed_in_passing(
    checkpoint: Path, second_reads: list[tuple[str, int]], shows: bool
) -> None:
    path, memory = checkpoint / "a.safetensors", ElsewhereMemory(shows=shows)
    files = CheckpointFiles.single(path)
    with CheckpointIdentity(files) as identity, path.open("rb") as file:
        identity.start_background()
        target = torch.empty(2 * MIB, dtype=torch.uint8, device="meta")
        HashedReads(memory, identity).read_file(file.fileno(), 0, target)  # type: ignore[arg-type]
        assert memory.calls == [(0, 2 * MIB)]
        found = identity.finish().hex
    assert (("a.safetensors", 0) in second_reads) is not shows
    assert found == hash_files(files)


def test_no_descriptors_left_is_said_so(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(FileLimitError, match=r"limit is 3"):
            hashing.open_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
