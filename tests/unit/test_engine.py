"""The ranks of an engine decide together: all attach, or all load. Ranks are threads here, and processes in the engines' tests."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.roundtrip import mapped_segments
from torch import nn

from torchwcache.attaching import Attaching, AttachOptions
from torchwcache.attachment import Attachment
from torchwcache.cache import DaemonCache
from torchwcache.config import Mode, ModelConfig, Parallelism, Policy
from torchwcache.engine import EngineOptions, GridRanks, OneRank, ProcessGroupRanks, RankStart, attach_rank
from torchwcache.errors import (
    CheckpointChangedError,
    ConfigError,
    DaemonUnavailable,
    MismatchError,
    RankError,
    RebindError,
    RefusedError,
)
from torchwcache.identity.checkpoint import CheckpointIdentity
from torchwcache.memory.host import HostMemory
from torchwcache.wire.client import DaemonConnection
from torchwcache_nn import NNAdapter

RANKS = 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Threads:
    """Ranks that are threads of this process."""

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size, self._timeout_s = size, timeout_s
        self._words: dict[tuple[int, int], str] = {}
        self._turns = [0] * size
        self._changed = threading.Condition()

    def rank(self, number: int) -> _ThreadRank:
        return _ThreadRank(self, number)

    def exchange(self, rank: int, word: str, what: str) -> Sequence[str]:
        with self._changed:
            turn = self._turns[rank]
            self._turns[rank] += 1
            self._words[turn, rank] = word
            self._changed.notify_all()
            there = self._changed.wait_for(lambda: all((turn, i) in self._words for i in range(self.size)), self._timeout_s)
            if not there:
                raise RankError(f"nobody came to agree on {what}")
            return tuple(self._words[turn, i] for i in range(self.size))


class _ThreadRank:
    def __init__(self, threads: Threads, rank: int) -> None:
        self._threads, self.rank, self.size = threads, rank, threads.size

    def exchange(self, word: str, what: str) -> Sequence[str]:
        return self._threads.exchange(self.rank, word, what)


class CountingAdapter(NNAdapter):
    """Counts loads; does what a test tells it to."""

    def __init__(self, rank: int) -> None:
        self.rank, self.loads = rank, 0
        self.publishes: list[bool] = []
        self.on_prepare: Callable[[nn.Module], None] = lambda module: None
        self.on_load: Callable[[nn.Module], None] = lambda module: None

    def load(self, cfg: ModelConfig, context: Any) -> Any:
        self.loads += 1
        self.publishes.append(context.publishes)
        result = super().load(cfg, context)
        self.on_load(result.module)
        return result

    def prepare(self, cfg: ModelConfig, module: nn.Module) -> None:
        super().prepare(cfg, module)
        self.on_prepare(module)


class Engine:
    """One engine of several ranks."""

    def __init__(self, checkpoint: Path, socket: str, size: int = RANKS, **options: Any) -> None:
        self.adapters = [CountingAdapter(rank) for rank in range(size)]
        self.options = EngineOptions.from_mapping({"mode": "client", "socket": socket, **options}, environ={})
        self.checkpoint, self.size = checkpoint, size
        self.lines: list[str] = []
        self.shared: list[bool | None] = [None] * size
        self.needed = [0] * size

    def start(self, timeout_s: float = 60.0) -> list[Any]:
        """Start all ranks; gives each rank's attachment, or what it raised."""
        threads, results = Threads(self.size), [None] * self.size

        def one(rank: int) -> None:
            cfg = ModelConfig(self.checkpoint, build=Net, parallel=Parallelism(tp_size=self.size, tp_rank=rank), adapter="nn")
            try:
                group = threads.rank(rank) if self.size > 1 else None
                if group is None:
                    results[rank] = attach_rank(cfg, self.adapters[rank], self.options, say=self.lines.append)
                    return
                start = RankStart(cfg, self.adapters[rank], self.options, group, say=self.lines.append)
                start.decide()
                self.needed[rank] = start.needed_nbytes()  # as the engines' loaders ask, whatever was decided
                results[rank] = start.finish()
                self.shared[rank] = start.shared
            except Exception as error:  # the test looks at it
                results[rank] = error

        running = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in running:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), "a rank hangs"
        return results

    @property
    def loads(self) -> list[int]:
        return [adapter.loads for adapter in self.adapters]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Net().state_dict(), tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


@pytest.fixture
def engine(checkpoint: Path, daemon: Any) -> Callable[..., Engine]:
    return lambda **options: Engine(checkpoint, daemon.socket, **options)


def sources(results: Sequence[Attachment]) -> list[tuple[str, bool]]:
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [(result.report.source, result.report.published) for result in results]


def close(results: Sequence[Attachment]) -> None:
    for result in results:
        result.close()


def test_first_all_publish_then_all_attach(engine, daemon):
    first, second = engine(), engine()
    one = first.start()
    assert sources(one) == [("disk", True)] * RANKS
    assert all("miss (not in the cache)" in line and "published" in line for line in first.lines)
    two = second.start()
    assert sources(two) == [("cache", False)] * RANKS
    assert second.loads == [0] * RANKS
    assert sorted(line.split(",")[1] for line in second.lines) == [f" rank {i} of {RANKS}" for i in range(RANKS)]
    assert all("hit: " in line and "nothing read" in line for line in second.lines)
    x = torch.ones(16)
    assert len({tuple(item.model(x).tolist()) for item in (*one, *two)}) == 1
    close([*one, *two])


def test_one_shard_is_gone_so_all_load_and_none_is_published_twice(engine, daemon):
    first = engine().start()
    keys = [item.report.fingerprint for item in first]
    close(first)
    cache = DaemonCache(daemon.socket, start=False)
    cache.evict(keys[1])
    again = engine()
    results = again.start()
    assert again.loads == [1] * RANKS
    assert [adapter.publishes for adapter in again.adapters] == [[True]] * RANKS
    assert sources(results) == [("cache", False), ("disk", True), ("cache", False)]  # the loaded copy gave way to the shared one
    assert sorted(entry.key for entry in cache.entries()) == sorted(keys)
    close(results)


def cannot_rebind(adapter: CountingAdapter, *, always: bool = False) -> None:
    """The next rebind with this adapter, or every one, fails."""

    def fail(module: nn.Module) -> None:
        if not always:
            adapter.on_prepare = lambda module: None
        raise RebindError("does not fit", problems=[("linear", "is something else here")])

    adapter.on_prepare = fail


def test_a_rank_that_cannot_rebind_takes_all_back_to_the_disk(engine):
    close(engine().start())
    broken = engine()
    cannot_rebind(broken.adapters[1])
    results = broken.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert all(broken.needed)
    assert broken.loads == [1] * RANKS
    assert [adapter.publishes for adapter in broken.adapters] == [[False]] * RANKS  # loaded as without us
    assert [item.report.mapped_nbytes for item in results] == [0] * RANKS
    assert all("rank 1 cannot use the cache" in "".join(item.report.warnings) for item in (results[0], results[2]))
    assert all(torch.equal(item.model(torch.ones(16)), results[0].model(torch.ones(16))) for item in results)
    close(results)


def test_what_was_mapped_in_vain_is_given_back_before_anything_is_loaded(engine, wait_until):
    """There may not be room for both."""
    close(engine().start())
    before = mapped_segments()
    broken = engine()
    cannot_rebind(broken.adapters[1])
    loaded: list[nn.Module] = []

    def load(module: nn.Module) -> None:
        """The thread that loads gives nothing back meanwhile; another rank may, since ranks do not wait for each other here."""
        wait_until(lambda: mapped_segments() == before, what="nothing is mapped")
        loaded.append(module)

    for adapter in broken.adapters:
        adapter.on_load = load
    results = broken.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert len(loaded) == RANKS
    close(results)


def alone(engine, checkpoint, daemon, build=Net):
    """Attaches with an adapter, as one process does by itself."""
    cfg = ModelConfig(checkpoint, build=build, adapter="nn")
    options = AttachOptions(socket=daemon.socket, start=False, policies=engine().options.policies)
    return lambda adapter: Attaching(cfg, options, adapter).run()


def test_also_where_one_process_attaches_by_itself(engine, checkpoint, daemon):
    attach = alone(engine, checkpoint, daemon)
    attached = attach(CountingAdapter(0))
    before = mapped_segments()
    adapter = CountingAdapter(0)
    cannot_rebind(adapter)
    seen: list[int] = []
    adapter.on_load = lambda module: seen.append(mapped_segments())
    again = attach(adapter)
    assert (again.report.source, seen) == ("disk", [before])
    close([attached, again])


def test_nor_does_the_cause_of_the_error_keep_it(engine, checkpoint, daemon):
    attach = alone(engine, checkpoint, daemon)
    attached = attach(CountingAdapter(0))
    before = mapped_segments()
    adapter = CountingAdapter(0)
    seen: list[int] = []
    adapter.on_load = lambda module: seen.append(mapped_segments())

    def check(module: nn.Module) -> None:
        weight = module.linear.weight
        raise ValueError(f"no kernel for {weight.dtype}")

    def prepare(module: nn.Module) -> None:
        adapter.on_prepare = lambda module: None
        try:
            check(module)
        except ValueError as error:
            raise RebindError("does not fit", problems=[("linear", "has no kernel")]) from error

    adapter.on_prepare = prepare
    again = attach(adapter)
    assert (again.report.source, seen) == ("disk", [before])
    close([attached, again])


def test_a_method_of_a_tensor_does_not_hide_what_went_wrong(engine, checkpoint, daemon):
    attach = alone(engine, checkpoint, daemon)
    attached = attach(CountingAdapter(0))
    adapter = CountingAdapter(0)
    cannot_rebind(adapter)
    fail = adapter.on_prepare

    def prepare(module: nn.Module) -> None:
        module.norm = module.linear.weight.norm
        fail(module)

    adapter.on_prepare = prepare
    again = attach(adapter)
    assert again.report.source == "disk"
    close([attached, again])


class Table:
    """What all models of a program have in common, such as an engine's live configuration; and one of those models."""

    def __init__(self) -> None:
        self.factors = torch.full((16,), 2.0)
        self.models = {"target": nn.Linear(16, 16)}


class NetWithTable(Net):
    TABLE: Table

    def __init__(self) -> None:
        super().__init__()
        self.table = NetWithTable.TABLE

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table.factors


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table()
    monkeypatch.setattr(NetWithTable, "TABLE", table, raising=False)
    return table


def test_what_an_attach_did_not_map_stays_where_it_cannot_rebind(engine, checkpoint, daemon, table):
    """The module that was built leads to what others use, and so does the one that is loaded instead."""
    attach = alone(engine, checkpoint, daemon, NetWithTable)
    attached = attach(CountingAdapter(0))
    assert attached.report.published, attached.report
    expected = attached.model(torch.ones(16))
    factors, weight = table.factors, table.models["target"].weight
    adapter = CountingAdapter(0)
    cannot_rebind(adapter)
    again = attach(adapter)
    assert again.report.source == "disk"
    assert table.models["target"].weight is weight
    assert table.factors is factors
    assert torch.equal(again.model(torch.ones(16)), expected)
    close([attached, again])


def test_nor_does_it_go_where_another_rank_cannot_rebind(engine, checkpoint, table):
    cfg = ModelConfig(checkpoint, build=NetWithTable, adapter="nn")
    published = attach_rank(cfg, CountingAdapter(0), engine().options)
    expected, factors = published.model(torch.ones(16)), table.factors
    words: list[str] = []

    class Other(OneRank):
        """As if there were one more rank, which sees something else in the module."""

        def exchange(self, word: str, what: str) -> Sequence[str]:
            words.append(what)
            return (word, "load it does not fit") if what == "the module rebound" else (word,)

    again = attach_rank(cfg, CountingAdapter(0), engine().options, Other())
    assert "the module rebound" in words
    assert again.report.source == "disk"
    assert table.factors is factors
    assert torch.equal(again.model(torch.ones(16)), expected)
    close([published, again])


def test_by_policy_it_stops_all_ranks(engine):
    close(engine().start())
    broken = engine(on_mismatch="error")
    cannot_rebind(broken.adapters[1], always=True)
    results = broken.start()
    assert [type(item) for item in results] == [RankError, RebindError, RankError]
    assert "rank 1 of 3 stopped the start" in str(results[0])
    assert broken.loads == [0] * RANKS


def test_a_refusal_in_one_rank_is_remembered_and_ends_the_cache_for_all(engine):
    class Opaque:
        __slots__ = ("__weakref__",)

    refused = engine()
    refused.adapters[2].on_load = lambda module: setattr(module, "handle", threading.Thread())
    results = refused.start()
    assert [item.report.published for item in results] == [True, True, False]
    assert "CaptureError" in "".join(results[2].report.warnings)
    assert refused.shared == [True] * RANKS  # the one that has its weights for itself must not write either
    close(results)
    again = engine()
    results = again.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert again.shared == [False] * RANKS
    assert again.loads == [1] * RANKS
    assert all("RefusedError" in "".join(item.report.warnings) for item in results)
    close(results)
    strict = engine(on_refused="error")
    assert [type(item) for item in strict.start()] == [RankError, RankError, RefusedError]
    assert strict.loads == [0] * RANKS


def test_room_is_made_for_a_shard_and_not_for_the_checkpoint_of_all_ranks(engine, monkeypatch):
    """What many ranks load together is larger than any device."""
    monkeypatch.setattr(CheckpointIdentity, "nbytes", property(lambda identity: 1 << 50))
    results = engine().start()
    assert sources(results) == [("disk", True)] * RANKS
    close(results)


def test_a_publish_that_fails_at_its_end_leaves_weights_that_may_not_be_written(engine, monkeypatch):
    """Whether the daemon heard of the commit nobody knows, and on a GPU the memory is read-only by then."""

    def fail(connection: DaemonConnection, request: Any, fds: Any) -> Any:
        raise DaemonUnavailable("it died at this very moment")

    monkeypatch.setattr(DaemonConnection, "commit", fail)
    started = engine()
    results = started.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert started.shared == [True] * RANKS
    close(results)


@pytest.fixture
def full_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[int]]:
    """Each rank's memory is full until something is evicted for this rank; gives the ranks that asked, as numbers of threads."""
    asked: set[int] = set()
    available, make_room = HostMemory.available_nbytes, DaemonConnection.make_room

    def evict(connection: DaemonConnection, device: str, *, nbytes: int) -> Any:
        asked.add(threading.get_ident())
        return make_room(connection, device, nbytes=nbytes)

    def fill() -> set[int]:
        monkeypatch.setattr(DaemonConnection, "make_room", evict)
        monkeypatch.setattr(
            HostMemory, "available_nbytes", lambda memory: available(memory) if threading.get_ident() in asked else 0
        )
        return asked

    return fill


def test_a_rank_that_gave_its_hit_back_makes_room_too(engine, daemon, full_memory):
    first = engine().start()
    close(first)
    DaemonCache(daemon.socket, start=False).evict(first[1].report.fingerprint)
    asked = full_memory()
    results = engine().start()
    assert len(asked) == RANKS
    assert sources(results) == [("disk", True)] * RANKS
    close(results)


def test_what_nobody_uses_makes_room_for_a_load_without_the_cache(engine, daemon, full_memory):
    close(engine().start())
    broken = engine()
    cannot_rebind(broken.adapters[1])
    asked = full_memory()
    results = broken.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert asked
    assert DaemonCache(daemon.socket, start=False).entries() == ()
    close(results)


def test_nothing_is_evicted_in_vain(engine, daemon, monkeypatch):
    close(engine().start())
    cache = DaemonCache(daemon.socket, start=False)
    before = len(cache.entries())
    start = RankStart(ModelConfig("-", build=Net, adapter="nn"), NNAdapter(), engine().options)
    start.free_up(1 << 50)
    assert (start.evicted_nbytes, len(cache.entries())) == (0, before)
    monkeypatch.setattr(HostMemory, "available_nbytes", lambda memory: 0)
    start.free_up(1)
    assert start.evicted_nbytes > 0
    assert len(cache.entries()) < before


def touch(checkpoint: Path) -> None:
    """Change the file's stat and not its content, as a backup by hard links does."""
    other = checkpoint.with_name("other")
    other.hardlink_to(checkpoint)
    other.unlink()


def test_a_checkpoint_that_is_touched_while_it_is_loaded_is_served_unpublished(engine, checkpoint):
    touched = engine()
    touched.adapters[1].on_load = lambda module: touch(checkpoint)
    results = touched.start()
    assert [result.report.published for result in results].count(False) >= 1
    assert "CheckpointChangedError" in "".join("".join(result.report.warnings) for result in results)
    assert {source for source, _ in sources(results)} == {"disk"}
    assert len({tuple(item.model(torch.ones(16)).tolist()) for item in results}) == 1
    close(results)
    strict = engine(on_refused="error")
    strict.adapters[1].on_load = lambda module: touch(checkpoint)
    assert CheckpointChangedError in [type(item) for item in strict.start()]


def test_no_daemon(checkpoint, private_socket):
    loading = Engine(checkpoint, private_socket)
    results = loading.start()
    assert sources(results) == [("disk", False)] * RANKS
    assert "DaemonUnavailable" in "".join(results[0].report.warnings)
    strict = Engine(checkpoint, private_socket, on_unavailable="error")
    assert [type(item) for item in strict.start()] == [DaemonUnavailable, RankError, RankError]
    assert strict.loads == [0] * RANKS


def test_another_fingerprint_in_the_slot(engine, checkpoint):
    close(engine().start())
    save_file({name: tensor + 1 for name, tensor in Net().state_dict().items()}, checkpoint)
    strict = engine(on_mismatch="error")
    assert [type(item) for item in strict.start()] == [MismatchError, RankError, RankError]
    loading = engine()
    results = loading.start()
    assert sources(results) == [("disk", True)] * RANKS
    assert all("the cached entry differs in checkpoint.content" in line for line in loading.lines)
    close(results)


def test_two_engines_at_once_do_not_wait_for_each_other_in_a_circle(engine, daemon):
    engines = [engine(), engine(), engine()]
    for one in engines:
        for adapter in one.adapters:  # long enough for the others to arrive in the middle of it
            adapter.on_load = lambda module: time.sleep(0.3)
    results: list[list[Any]] = [[], [], []]

    def start(number: int) -> None:
        results[number] = engines[number].start()

    threads = [threading.Thread(target=start, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    seen = Counter(pair for each in results for pair in sources(each))
    assert seen["disk", True] == RANKS
    assert len(DaemonCache(daemon.socket, start=False).entries()) == RANKS
    for each in results:
        close(each)


def test_a_load_that_fails_leaves_nothing_behind(engine, daemon):
    failing = engine()

    def fail(module: nn.Module) -> None:
        raise RuntimeError("the disk burns")

    for adapter in failing.adapters:
        adapter.on_load = fail
    assert [str(item) for item in failing.start()] == ["the disk burns"] * RANKS
    assert DaemonCache(daemon.socket, start=False).entries() == ()
    results = engine().start()
    assert sources(results) == [("disk", True)] * RANKS  # the tickets were given back
    close(results)


def test_a_rank_that_does_not_come_is_an_error_and_not_a_hang(engine, checkpoint):
    options = engine().options
    cfg = ModelConfig(checkpoint, build=Net, parallel=Parallelism(tp_size=2, tp_rank=0))
    start = RankStart(cfg, CountingAdapter(0), options, Threads(2, timeout_s=0.2).rank(0))
    with pytest.raises(RankError, match="nobody came to agree on the description"):
        start.decide()


def test_deciding_loads_nothing_and_holds_a_lease(engine, daemon, checkpoint):
    one = engine(size=1)
    cfg = ModelConfig(checkpoint, build=Net)
    start = RankStart(cfg, one.adapters[0], one.options)
    assert not start.decide()
    assert one.loads == [0]
    attachment = start.finish()
    assert one.loads == [1]
    second = RankStart(cfg, CountingAdapter(0), one.options)
    assert second.decide()
    assert second.report.mapped_nbytes == attachment.report.mapped_nbytes > 0
    (entry,) = DaemonCache(daemon.socket, start=False).entries()
    assert entry.leases == 2
    second.close()
    attachment.close()


def test_options() -> None:
    options, rest = EngineOptions.split({"mode": "client", "socket": "/x", "num_threads": 4, "on_mismatch": "error"}, environ={})
    assert (options.mode, options.socket, rest) == (Mode.CLIENT, "/x", {"num_threads": 4})
    assert options.policies.on_mismatch is Policy.ERROR
    assert options.policies.on_refused is Policy.LOAD
    assert EngineOptions.from_mapping({}, environ={}).mode is Mode.OFF
    environ = {"TORCHWCACHE_MODE": "daemon", "TORCHWCACHE_SOCKET": "/y", "TORCHWCACHE_FALLBACK": "error"}
    options = EngineOptions.from_mapping({"mode": "off", "socket": "/x"}, environ=environ)
    assert (options.mode, options.socket) == (Mode.DAEMON, "/y")
    assert options.policies.on_refused is Policy.ERROR
    with pytest.raises(ConfigError, match=r"unknown torchwcache options \['on_mismatc'\]"):
        EngineOptions.from_mapping({"on_mismatc": "error"}, environ={})
    with pytest.raises(ConfigError, match="on_mismatch"):
        EngineOptions.from_mapping({"on_mismatch": "perhaps"}, environ={})
    with pytest.raises(ConfigError, match="mode is off"):
        RankStart(ModelConfig("x"), NNAdapter(), EngineOptions.from_mapping({}, environ={}))


def test_a_grid_of_ranks_hears_all_in_order() -> None:
    rows, columns = [Threads(3) for _ in range(2)], [Threads(2) for _ in range(3)]
    heard: dict[int, Sequence[str]] = {}

    def one(outer: int, inner: int) -> None:
        grid = GridRanks(rows[outer].rank(inner), columns[inner].rank(outer))
        assert grid.size == 6
        heard[grid.rank] = grid.exchange(f"{outer}{inner}", "the grid")

    threads = [threading.Thread(target=one, args=(outer, inner)) for outer in range(2) for inner in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert heard == dict.fromkeys(range(6), ("00", "01", "02", "10", "11", "12"))
    assert OneRank().exchange("x", "") == ("x",)


def _rank_process(rank: int, store: str, queue: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks = ProcessGroupRanks(dist.group.WORLD, timeout_s=5.0)
    queue.put(list(ranks.exchange(f"rank {rank} says {'é' * rank * 3000}", "greeting")))
    if rank == 1:
        queue.close()
        queue.join_thread()
        time.sleep(0.5)
        import os

        os._exit(9)
    start = time.monotonic()
    try:
        ranks.exchange("still here", "the second greeting")
    except RankError as error:
        queue.put([str(error), time.monotonic() - start])


def test_a_dead_rank_is_noticed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: Any = context.Queue()
    processes = [context.Process(target=_rank_process, args=(rank, str(tmp_path / "store"), queue)) for rank in range(2)]
    for process in processes:
        process.start()
    got = [queue.get(timeout=60) for _ in range(3)]
    for process in processes:
        process.join(30)
    greetings = [item for item in got if item[0].startswith("rank 0 says")]
    assert len(greetings) == 2
    assert greetings[0] == greetings[1]
    assert greetings[0][1].startswith("rank 1 says éé")
    (failure,) = [item for item in got if item not in greetings]
    assert "another rank is gone" in failure[0]
    assert "the second greeting" in failure[0]
    assert failure[1] < 10
