from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import gpu_models, gpu_worker, plain_models
from support.gpu_processes import GpuCrew, turn
from support.processes import Worker, WorkerPool

LAYERS = 40
"""Of 4 MiB each."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Tests that measure the memory of the whole GPU (fixture ``alone``) wait for all others to end, outside of any timeout."""
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with turn(alone="alone" in getattr(item, "fixturenames", ())):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that run alone come last: in between, all others would have to end first each time."""
    items.sort(key=lambda item: "alone" in getattr(item, "fixturenames", ()))


@pytest.fixture
def alone() -> None:
    """No other test uses the GPU meanwhile; see :func:`pytest_runtest_protocol`."""


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda"


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool({"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    yield pool
    pool.close()


@pytest.fixture
def workers(worker_pool: WorkerPool, private_socket: str, tmp_path: Path) -> Iterator[GpuCrew]:
    """Processes that use the cache at this test's own socket, with a memory of checkpoints of this test's own."""
    crew = GpuCrew(worker_pool, {"TORCHWCACHE_SOCKET": private_socket, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    yield crew
    assert crew.dismiss() == []


@pytest.fixture
def watcher(workers: GpuCrew, device: str) -> Worker:
    """A process with a context, which looks at the GPU's memory and has no part in what is tested."""
    one = workers()
    one.do(gpu_worker.warm_up, device=device)
    return one


@pytest.fixture
def linked(tmp_path: Path, device: str) -> dict[str, Any]:
    """A small model with ties, views and a buffer that no checkpoint holds, and its checkpoint."""
    path = plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors")
    return {"checkpoint": path, "build": "support.plain_models:Linked", "device": device}


@pytest.fixture
def zoo(tmp_path: Path, device: str) -> dict[str, Any]:
    """A small model with something of everything, flags and views made after loading included."""
    path = gpu_models.save(gpu_models.Zoo, tmp_path / "zoo.safetensors")
    return {"checkpoint": path, "build": "support.gpu_models:Zoo", "finalize": "support.plain_models:stamp", "device": device}


@pytest.fixture
def wide(tmp_path: Path, device: str) -> Iterator[dict[str, Any]]:
    """160 MiB."""
    path = plain_models.save(plain_models.Wide, tmp_path / "wide.safetensors", layers=LAYERS)
    yield {"checkpoint": path, "build": "support.plain_models:Wide", "build_kwargs": {"layers": LAYERS}, "device": device}
    Path(path).unlink()


@pytest.fixture
def big(tmp_path: Path, device: str) -> dict[str, Any]:
    """1 GiB, to be made on the GPU and published by hand: no checkpoint holds it."""
    path = plain_models.save(plain_models.Wide, tmp_path / "small.safetensors", layers=1)
    return {"checkpoint": path, "build": "support.gpu_models:Fused", "build_kwargs": {"layers": 264}, "device": device}
