"""Tests on the real SGLang: `make test-sglang` makes an environment that has it; elsewhere they are not collected."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

try:
    metadata.version("sglang")
    collect_ignore_glob: list[str] = []
except metadata.PackageNotFoundError:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint of each kind."""
    from checkpoints import KINDS
    from sglang_running import environment

    folder = tmp_path_factory.mktemp("checkpoints")
    subprocess.run(
        [sys.executable, str(HERE / "checkpoints.py"), str(folder), *KINDS],
        env=environment(folder / "none", folder),
        check=True,
        timeout=120,
    )
    return folder


class Cache:
    """A daemon's place of its own, and the engines that are started on it."""

    def __init__(self, folder: Path, logs: Path) -> None:
        self.folder, self.logs = folder, logs
        self.socket = folder / "daemon.sock"
        self._numbers = itertools.count()

    def environment(self, **more: str) -> dict[str, str]:
        from sglang_running import environment

        return environment(self.socket, self.folder, **more)

    def start(self, model: Path, *, mode: str = "daemon", env: dict[str, str] | None = None, **options: Any) -> Any:
        """An engine that asks for the cache by ``TORCHWCACHE_MODE`` (not at all when that is empty)."""
        from sglang_running import Engine

        variables = {"TORCHWCACHE_MODE": mode} if mode else {}
        return Engine(
            model, self.logs / f"engine{next(self._numbers)}.log", self.environment(**variables, **(env or {})), **options
        )

    def serve(self, model: Path, *, launch: list[str], **options: Any) -> Any:
        """A web server that asks for the cache by the key of its loader's options."""
        from sglang_running import Server

        asked = json.dumps({"torchwcache": {"mode": "daemon"}})
        log = self.logs / f"server{next(self._numbers)}.log"
        return Server(model, log, self.environment(), launch=launch, model_loader_extra_config=asked, **options)

    def command(self, *arguments: str) -> str:
        from sglang_running import command

        return command(self.environment(), *arguments)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """Not under ``tmp_path``: a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="twc") as folder:
        made = Cache(Path(folder), tmp_path)
        yield made
        made.command("stop")
