"""On a hit the weight files are at most stat-ed: nothing opens them, whichever way one looks."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import subprocess
import time

import pytest
from support import worker

IN_OPEN, IN_ACCESS = 0x20, 0x1
_EVENT = struct.Struct("iIII")
SETTLED_S = 2.1


class Watch:
    """What the kernel says about one file: whether anybody opened or read it, in whatever language (inotify)."""

    def __init__(self, path):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._fd >= 0, os.strerror(ctypes.get_errno())
        assert self._libc.inotify_add_watch(self._fd, os.fsencode(path), IN_OPEN | IN_ACCESS) >= 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self._fd)

    def seen(self):
        """``open`` and ``access`` events since the last call."""
        found = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._fd, 65536):
                position = 0
                while position < len(data):
                    _, mask, _, length = _EVENT.unpack_from(data, position)
                    found |= {name for name, bit in (("open", IN_OPEN), ("access", IN_ACCESS)) if mask & bit}
                    position += _EVENT.size + length
        return found


def settled(path, wait_until):
    """From here on the stat of the file is something that a digest can be remembered by."""
    wait_until(lambda: time.time() > os.stat(path).st_ctime + SETTLED_S, what=f"{path} is old enough")
    return path


def weights_in(opens, path):
    return [name for name in opens if os.path.basename(name) == os.path.basename(path)]


def test_a_hit_opens_no_weights(workers, daemon, linked, wait_until):
    path = settled(linked["checkpoint"], wait_until)
    producer, client = workers.several(2)
    with Watch(path) as watch:
        producer.do(worker.attach, cfg=linked)
        assert watch.seen() == {"open", "access"}, "the producer reads the file, or this test cannot see anybody read it"

        client.do(worker.listen_to_opens)
        assert client.do(worker.attach, cfg=linked)["source"] == "cache"
        client.do(worker.output)
        assert watch.seen() == set()
        assert weights_in(client.do(worker.opened), path) == []

        client.do(worker.attach, cfg=linked, name="loaded", mode="off")
        assert watch.seen() == {"open", "access"}
        assert weights_in(client.do(worker.opened), path), "a load must trip the hook"


def test_a_file_that_changed_just_now_is_hashed_but_not_loaded(workers, daemon, linked):
    """Its stat says nothing yet: reading it once is the price of not serving the weights of a moment ago."""
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg=linked)
    with Watch(linked["checkpoint"]) as watch:
        report = client.do(worker.attach, cfg=linked)
        assert report["source"] == "cache"
        assert "load" not in report["seconds"]
        assert watch.seen() == {"open", "access"}


def make_llama(here, *, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
        )
    ).save_pretrained(folder)


def test_a_hit_opens_no_weights_of_a_transformers_model(workers, daemon, tmp_path, wait_until):
    folder = str(tmp_path / "llama")
    producer, client = workers.several(2)
    producer.do(make_llama, folder=folder)
    path = settled(f"{folder}/model.safetensors", wait_until)
    producer.do(worker.attach, cfg={"checkpoint": folder})
    with Watch(path) as watch:
        client.do(worker.listen_to_opens)
        assert client.do(worker.attach, cfg={"checkpoint": folder})["source"] == "cache"
        client.do(worker.output)
        assert watch.seen() == set()
        assert weights_in(client.do(worker.opened), path) == []
        assert weights_in(client.do(worker.opened), "config.json"), "the hook sees what else is opened"

        client.do(worker.attach, cfg={"checkpoint": folder}, name="loaded", mode="off")
        assert "open" in watch.seen()


def can_trace():
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(not can_trace(), reason="strace is missing or may not trace here; inotify and the audit hook look too")
def test_a_hit_makes_no_system_call_that_opens_weights(workers, daemon, linked, tmp_path, wait_until):
    settled(linked["checkpoint"], wait_until)
    producer = workers()
    producer.do(worker.attach, cfg=linked)
    log = tmp_path / "calls"
    trace = ("strace", "-f", "-qq", "-e", "trace=open,openat,openat2", "-o", str(log))
    client = workers.fresh(prefix=trace)
    assert client.do(worker.attach, cfg=linked)["source"] == "cache"
    assert client.do(worker.output) == producer.do(worker.output)
    calls = [line for line in log.read_text().splitlines() if "linked.safetensors" in line]
    assert calls == []
    client.do(worker.attach, cfg=linked, name="loaded", mode="off")
    wait_until(lambda: "linked.safetensors" in log.read_text(), what="the trace shows that a load opens the file")
