"""Deaths on a GPU, by SIGKILL: of a producer, a client, the daemon; and what the daemon and a forked child do with CUDA."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import time

import pytest
from support import gpu_worker, worker

pytestmark = pytest.mark.gpu

MIB = 1 << 20
GIB = 1 << 30
SLACK_NBYTES = 64 * MIB


def is_free(watcher, nbytes):
    """Whether the GPU has so much free memory again, or nearly."""
    return watcher.do(gpu_worker.free_nbytes) > nbytes - SLACK_NBYTES


# ---- producers ---------------------------------------------------------------------------------------------------------------


def test_a_producer_killed_before_the_commit_leaves_nothing(alone, watcher, workers, daemon, wide, tmp_path, wait_until):
    start = watcher.do(gpu_worker.free_nbytes)
    producer = workers.fresh()
    producer.begin(worker.attach_and_stop, at="publish", release=str(tmp_path / "never"), cfg=wide)
    producer.wait_for("publish")
    assert watcher.do(gpu_worker.free_nbytes) < start - 160 * MIB
    producer.kill()
    wait_until(lambda: is_free(watcher, start), what="the memory is free again")
    assert watcher.do(gpu_worker.entries) == []
    report = workers().do(gpu_worker.attach, cfg=wide)
    assert (report["source"], report["published"], report["warnings"]) == ("disk", True, [])


def test_what_a_producer_committed_outlives_it(workers, daemon, linked):
    """And every process that uses CUDA."""
    producer = workers.fresh()
    producer.do(gpu_worker.attach, cfg=linked)
    before, answer = producer.do(gpu_worker.state), producer.do(gpu_worker.output)
    producer.kill()
    for client in (workers.fresh(), workers.fresh()):
        report = client.do(gpu_worker.attach, cfg=linked, fallback="error")
        assert (report["source"], report["warnings"]) == ("cache", [])
        assert (client.do(gpu_worker.state), client.do(gpu_worker.output)) == (before, answer)
        client.kill()


# ---- clients -----------------------------------------------------------------------------------------------------------------


def test_a_client_killed_while_its_kernels_run(workers, daemon, linked, tmp_path, wait_until):
    producer, dying = workers(), workers.fresh()
    producer.do(gpu_worker.attach, cfg=linked)
    dying.do(gpu_worker.attach, cfg=linked)
    before, answer = producer.do(gpu_worker.state), producer.do(gpu_worker.output)
    dying.begin(gpu_worker.compute_until, stop=str(tmp_path / "never"))
    dying.wait_for("computing")
    dying.kill()
    wait_until(lambda: producer.do(gpu_worker.entries)[0]["leases"] == 1, what="its lease ends")
    assert (producer.do(gpu_worker.state), producer.do(gpu_worker.output)) == (before, answer)
    later = workers()
    assert later.do(gpu_worker.attach, cfg=linked)["source"] == "cache"
    assert later.do(gpu_worker.output) == answer


@pytest.mark.parametrize("holds", ["the attachment", "a tensor"])
def test_a_client_that_holds_the_last_reference_dies(holds, alone, watcher, workers, daemon, big, wait_until):
    publisher, client = workers(), workers.fresh()
    publisher.do(gpu_worker.warm_up, device=big["device"])
    start = watcher.do(gpu_worker.free_nbytes)
    publisher.do(gpu_worker.make, cfg=big)
    publisher.do(gpu_worker.publish, cfg=big)
    client.do(gpu_worker.attach, cfg=big, variant="v")
    publisher.do(gpu_worker.close_all)
    assert watcher.do(gpu_worker.evict_everything) == [0, 1]
    if holds == "a tensor":
        client.do(close_but_keep_all)
        assert watcher.do(gpu_worker.entries) == []
    assert watcher.do(gpu_worker.free_nbytes) < start - GIB
    client.kill()
    wait_until(lambda: is_free(watcher, start), what="its memory is freed")
    assert watcher.do(gpu_worker.entries) == []


def close_but_keep_all(here):
    here.kept["tensors"] = list(here.models["model"].parameters())
    worker.close(here)


# ---- the daemon --------------------------------------------------------------------------------------------------------------


def gpu_pids():
    """Pids that use the GPU according to ``nvidia-smi``; ``None`` where that does not tell."""
    if shutil.which("nvidia-smi") is None:
        return None
    order = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    answer = subprocess.run(order, capture_output=True, text=True, timeout=60)
    return {int(line) for line in answer.stdout.split() if line.isdigit()} if answer.returncode == 0 else None


def test_the_daemon_has_nothing_to_do_with_cuda(alone, watcher, workers, daemon_class, private_socket, linked):
    before = watcher.do(gpu_worker.free_nbytes)
    daemon = daemon_class(private_socket)
    try:
        daemon.wait_ready()
        assert watcher.do(gpu_worker.free_nbytes) == before, "its start takes no memory of the GPU"
        one = workers.fresh()
        one.do(gpu_worker.attach, cfg=linked)
        pids = gpu_pids()
        assert pids is None or daemon.pid not in pids
        one.kill()
        with open(f"/proc/{daemon.pid}/maps") as file:
            libraries = {line.split("/")[-1].strip() for line in file if ".so" in line}
        assert libraries
        assert not [name for name in libraries if "cuda" in name or "torch" in name or "nvidia" in name]
        (entry,) = watcher.do(gpu_worker.entries)
        assert entry["memory"] == "cuda"
        assert 0 <= before - watcher.do(gpu_worker.free_nbytes) - entry["nbytes"] <= 4 * MIB, "what it holds is the weights alone"
    finally:
        daemon.end()


def test_a_killed_daemon(alone, watcher, workers, daemon, daemon_class, private_socket, big, linked, wait_until):
    """Its clients go on; its entries are gone; their memory goes with the last client."""
    publisher, client = workers.several(2)
    for one in (publisher, client):
        one.do(gpu_worker.warm_up, device=big["device"])
    start = watcher.do(gpu_worker.free_nbytes)
    publisher.do(gpu_worker.make, cfg=big)
    publisher.do(gpu_worker.publish, cfg=big)
    client.do(gpu_worker.attach, cfg=big, variant="v")
    answer = client.do(gpu_worker.output)
    daemon.kill()
    assert client.do(gpu_worker.output) == publisher.do(gpu_worker.output, name="published") == answer

    second = daemon_class(private_socket)
    try:
        second.wait_ready()
        assert watcher.do(gpu_worker.entries) == []
        assert watcher.do(gpu_worker.attach, cfg=linked)["published"]
        watcher.do(gpu_worker.close_all)
        publisher.do(gpu_worker.close_all)
        assert client.do(gpu_worker.output) == answer
        assert watcher.do(gpu_worker.free_nbytes) < start - GIB, "a client holds it still"
        client.do(gpu_worker.close_all)
        wait_until(lambda: is_free(watcher, start), what="the last client took the memory along")
    finally:
        second.end()


# ---- fork --------------------------------------------------------------------------------------------------------------------


def fork_and_end(here):
    """Fork; the child lets go of everything and ends as any interpreter does. Returns its status."""
    pid = os.fork()
    if pid == 0:
        for attachment in here.attachments.values():
            attachment.close()
        here.attachments.clear()
        here.models.clear()
        gc.collect()
        raise SystemExit(0)
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "it did not end"


def fork_and_stay(here):
    """Fork a child that does nothing for a minute, and return its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_a_forked_child_lets_go_without_harm(workers, daemon, linked, wait_until):
    producer, parent = workers(), workers.fresh()
    producer.do(gpu_worker.attach, cfg=linked)
    parent.do(gpu_worker.attach, cfg=linked)
    before, answer = parent.do(gpu_worker.state), parent.do(gpu_worker.output)
    assert parent.do(fork_and_end) == 0
    assert (parent.do(gpu_worker.state), parent.do(gpu_worker.output)) == (before, answer)
    assert parent.do(gpu_worker.protections)["block.weight"] == "r"
    assert producer.do(gpu_worker.entries)[0]["leases"] == 2

    child = parent.do(fork_and_stay)
    try:
        parent.kill()
        wait_until(lambda: producer.do(gpu_worker.entries)[0]["leases"] == 1, what="the parent's lease ends while its child lives")
        os.kill(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
