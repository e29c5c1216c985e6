"""SGLang's own web server starts from the cache when it is asked by the key alone, and answers as the engine does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

COMMAND = [str(Path(sys.executable).with_name("sglang")), "serve"]
MODULE = [sys.executable, "-m", "sglang.launch_server"]


def is_guarded(server: Any, *, times: int = 1) -> None:
    """What frees or writes weights is refused to whoever asks, and nothing is done."""
    # SGLang answers shortly before it counts itself idle, and ends when memory is asked back in between.
    time.sleep(1)
    for operation in ("release_memory_occupation", "resume_memory_occupation"):
        for body in [{}, {"tags": ["weights"]}] * times:
            status, text = server.ask(f"/{operation}", body)
            assert status == 400, text
            assert f"{operation} is refused for 'weights'" in text
            assert "Nothing was done" in text
    for operation in ("release_memory_occupation", "resume_memory_occupation"):
        assert server.ask(f"/{operation}", {"tags": ["kv_cache"]}) == (200, "null")


def test_it_starts_from_the_cache_by_the_key_and_outlives_the_daemon(cache: Any, checkpoints: Path) -> None:
    with cache.serve(checkpoints / "dense", launch=COMMAND) as first:
        tokens = first.started()
        assert first.lines[0].published, first.said
    with cache.serve(checkpoints / "dense", launch=COMMAND) as second:
        assert second.started() == tokens
        assert [line.what for line in second.lines] == ["hit"], second.said
        is_guarded(second)
        status, text = second.ask("/update_weights_from_disk", {"model_path": str(checkpoints / "other")})
        assert status == 400, text
        assert "update_weights_from_disk is refused" in text
        assert second.generate() == tokens
        daemon = json.loads(cache.command("status", "--json"))["daemon"]["pid"]
        os.kill(daemon, signal.SIGKILL)
        while Path(f"/proc/{daemon}").exists():
            time.sleep(0.05)  # the test's own timeout bounds it
        assert second.generate() == tokens
        assert second.ask("/release_memory_occupation", {})[0] == 400


def test_every_one_of_several_tokenizer_workers_is_guarded(cache: Any, checkpoints: Path) -> None:
    """SGLang loads no plugins in these; ``launch_server`` is the other way to start it."""
    with cache.serve(checkpoints / "dense", launch=MODULE, tokenizer_worker_num=2) as server:
        tokens = server.started()
        assert server.lines[0].published, server.said
        is_guarded(server, times=4)  # who accepts a connection is chance
        assert server.generate() == tokens
