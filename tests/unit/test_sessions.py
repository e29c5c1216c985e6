"""Engines that are killed leave nothing behind: neither processes nor names in /dev/shm."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from _sessions import end_session, named_memory

FAMILY = """
import json, subprocess, sys
from multiprocessing import get_context
from multiprocessing.resource_tracker import unregister
from multiprocessing.shared_memory import SharedMemory

def make():
    memory = SharedMemory(create=True, size=4096)
    unregister(memory._name, "shared_memory")  # else multiprocessing's own process removes it, unless it is killed soon enough
    return memory

if sys.argv[1:]:
    memory = make()
    print(memory.name, flush=True)
    sys.exit(sys.stdin.read())
memories = [make(), make()]
lock = get_context("spawn").Lock()
unregister(lock._semlock.name, "semaphore")
names = [*(memory.name for memory in memories), f"sem.{lock._semlock.name[1:]}"]
child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.PIPE, text=True)
print(json.dumps({"pid": child.pid, "names": names, "of_child": child.stdout.readline().strip()}), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, with a child; both have shared memory."""
    (tmp_path / "family.py").write_text(FAMILY)
    command = [sys.executable, str(tmp_path / "family.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        yield process
        end_session(process)


def test_a_session_ends_with_its_shared_memory_and_nobody_elses(family: subprocess.Popen[str]) -> None:
    assert family.stdout is not None
    found = json.loads(family.stdout.readline())
    with ExitStack() as stack:
        shared, own = SharedMemory(found["names"][0], create=False), SharedMemory(create=True, size=4096)
        for memory in (shared, own):
            stack.callback(memory.unlink)
            stack.callback(memory.close)
        end_session(family)
        assert not psutil.pid_exists(found["pid"]) or psutil.Process(found["pid"]).status() == psutil.STATUS_ZOMBIE
        left = {name for name in [*found["names"], found["of_child"], own.name] if Path("/dev/shm", name).exists()}
        assert left == {shared.name, own.name}
    end_session(family)


def test_what_those_had_that_ended_before_can_be_told(family: subprocess.Popen[str]) -> None:
    assert family.stdout is not None
    of_child = json.loads(family.stdout.readline())
    named = named_memory(family)
    psutil.Process(of_child["pid"]).kill()
    end_session(family, named=named)
    assert not any(Path("/dev/shm", name).exists() for name in [*of_child["names"], of_child["of_child"]])
    assert named_memory(family) == set()


def test_a_file_that_is_no_shared_memory_of_an_engine_stays() -> None:
    """Such as a checkpoint in /dev/shm."""
    code = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(flush=True); sys.stdin.read()"
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="checkpoint-") as file:
        file.write(b"weights")
        file.flush()
        command = [sys.executable, "-c", code, file.name]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            end_session(process)
        assert Path(file.name).read_bytes() == b"weights"


def test_a_strangers_session_of_the_same_number_is_left_alone(family: subprocess.Popen[str]) -> None:
    assert family.stdout is not None
    family.stdout.readline()
    ours = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    ours.wait(30)
    ours.pid = family.pid
    end_session(ours)
    assert family.poll() is None


def test_a_process_that_leads_no_session_is_not_taken_for_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with pytest.raises(ValueError, match="leads no session"):
            end_session(process)
        process.kill()


def test_killing_alone_leaves_it(family: subprocess.Popen[str]) -> None:
    """Why this exists."""
    assert family.stdout is not None
    found = json.loads(family.stdout.readline())
    names = [Path("/dev/shm", name) for name in [*found["names"], found["of_child"]]]
    for pid in (found["pid"], family.pid):
        psutil.Process(pid).kill()
    family.wait(30)
    assert all(name.exists() for name in names)
    for name in names:
        name.unlink()
