"""Engines of different kinds on one daemon, at the same time: the real vLLM and the real SGLang, each in its own environment.

``make test-engines`` makes both environments and runs this; no other command collects it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _engines import Engine

from torchwcache.cache import DaemonCache
from torchwcache.wire.client import DaemonConnection

ROOT = Path(__file__).parents[2]
KINDS = ("vllm", "sglang")
PROMPTS = [[3, 14, 15, 92, 65], [500, 7, 9]]


def python_of(kind: str) -> Path:
    return Path(os.environ.get(f"{kind.upper()}_VENV", ROOT / f".venv-{kind}")) / "bin" / "python"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [str(python_of(kind)) for kind in KINDS if not python_of(kind).exists()]
    assert not missing, f"run `make test-engines`: it makes what is not there ({', '.join(missing)})"
    folder = tmp_path_factory.mktemp("dense")
    script = ROOT / "tests" / "vllm" / "checkpoints.py"
    subprocess.run([str(python_of("vllm")), str(script), "dense", str(folder), "0"], check=True, timeout=120)
    return folder


@pytest.fixture
def start(tmp_path: Path, private_socket: str, checkpoint: Path) -> Iterator[Callable[[str], Any]]:
    """Starts an engine that uses the cache; those still up at the end are ended."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHWCACHE_", "VLLM", "SGLANG"))}
    environ |= {"TORCHWCACHE_SOCKET": private_socket, "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    more = {
        "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"},
        "sglang": {
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "tests" / "sglang" / "standin"), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "TORCHWCACHE_MODE": "daemon",
        },
    }
    started: list[Any] = []

    def begin(kind: str) -> Any:
        order = {"model": str(checkpoint), "way": "cache", "prompts": PROMPTS, "tokens": 12, "wait": True, "device": "cpu"}
        order["options"] = {"device": "cpu"} if kind == "sglang" else {}
        log = tmp_path / f"{len(started)}-{kind}.log"
        started.append(Engine(kind, order, {**environ, **more[kind]}, log, python=str(python_of(kind))))
        return started[-1]

    yield begin
    for engine in started:
        engine.end()


def test_both_publish_at_once_and_each_gets_its_own(start: Callable[[str], Any], private_socket: str) -> None:
    first = {kind: start(kind) for kind in KINDS}
    tokens = {kind: engine.result()["tokens"] for kind, engine in first.items()}
    for kind, engine in first.items():
        assert "published" in " ".join(engine.seen()["cache"]), engine.text[-4000:]
        assert len({token for line in tokens[kind] for token in line}) > 3
    entries = DaemonCache(private_socket, start=False).entries()
    assert len({entry.key for entry in entries}) == len({entry.slot for entry in entries}) == 2

    second = {kind: start(kind) for kind in KINDS}
    for kind, engine in second.items():
        assert engine.result()["tokens"] == tokens[kind]
        assert ": hit: " in " ".join(engine.seen()["cache"]), engine.text[-4000:]
    assert {entry.key for entry in DaemonCache(private_socket, start=False).entries()} == {entry.key for entry in entries}

    for engine in first.values():
        engine.kill()
    with DaemonConnection.connect(private_socket) as connection:
        os.kill(connection.status().pid, signal.SIGKILL)
    for kind, engine in second.items():
        assert engine.do(do="generate")["tokens"] == tokens[kind]
