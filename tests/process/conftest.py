from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import plain_models
from support.processes import Crew, WorkerPool


@pytest.fixture(scope="session")
def worker_pool() -> Iterator[WorkerPool]:
    pool = WorkerPool({"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"})
    yield pool
    pool.close()


@pytest.fixture
def workers(worker_pool: WorkerPool, private_socket: str, tmp_path: Path) -> Iterator[Crew]:
    """Processes that use the cache at this test's own socket, with a memory of checkpoints of this test's own."""
    crew = Crew(worker_pool, {"TORCHWCACHE_SOCKET": private_socket, "XDG_CACHE_HOME": str(tmp_path / "cache")})
    yield crew
    assert crew.dismiss() == []


@pytest.fixture
def linked(tmp_path: Path) -> dict[str, str]:
    """A model with ties, views and a buffer that no checkpoint holds, and its checkpoint."""
    return {
        "checkpoint": plain_models.save(plain_models.Linked, tmp_path / "linked.safetensors"),
        "build": "support.plain_models:Linked",
    }
