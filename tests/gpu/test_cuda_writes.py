"""F21 on a GPU: a kernel that writes to a weight ends the CUDA context of its own process, and harms nobody else."""

from __future__ import annotations

import signal

import pytest
import torch
from support import gpu_worker
from support.worker import digest

pytestmark = pytest.mark.gpu


def write(here, *, path, how, name="model"):
    """Run a kernel that writes to a parameter, and wait for what comes of it."""
    parameter = here.models[name].get_parameter(path)
    with torch.no_grad():
        match how:
            case "add":
                parameter.data.add_(1)
            case "copy":
                parameter.copy_(torch.zeros_like(parameter))
            case "view":
                parameter.view(-1)[:1].fill_(7)
    torch.cuda.synchronize()
    return digest(parameter)


@pytest.mark.parametrize(("who", "how"), [("client", "add"), ("producer", "add"), ("client", "copy"), ("producer", "view")])
def test_a_write_ends_the_writer_and_nobody_else(who, how, workers, daemon, linked, tmp_path, wait_until):
    victim, other, later = workers.fresh(), workers(), workers()
    first, second = (victim, other) if who == "producer" else (other, victim)
    assert first.do(gpu_worker.attach, cfg=linked)["published"]
    assert second.do(gpu_worker.attach, cfg=linked)["source"] == "cache"
    before, answer = other.do(gpu_worker.state), other.do(gpu_worker.output)
    assert victim.do(gpu_worker.output) == answer, "reading is what it is for"

    stop = tmp_path / "stop"
    other.begin(gpu_worker.compute_until, stop=str(stop))
    other.wait_for("computing")
    error = victim.fails(write, path="block.weight", how=how)
    assert error.type in ("AcceleratorError", "RuntimeError")
    assert "CUDA" in error.text
    assert later.do(gpu_worker.attach, cfg=linked)["source"] == "cache"
    stop.touch()
    assert other.result() == [answer], "it went on computing, and never anything else"
    assert (other.do(gpu_worker.state), other.do(gpu_worker.output)) == (before, answer)
    assert (later.do(gpu_worker.state), later.do(gpu_worker.output)) == (before, answer)

    assert victim.process.stdin
    victim.process.stdin.close()
    assert victim.process.wait(60) != -signal.SIGKILL, "a process whose context is gone can end"
    wait_until(lambda: other.do(gpu_worker.entries)[0]["leases"] == 2, what="its lease ends")


def test_a_variants_publisher_writes_no_more_either(workers, daemon, linked):
    victim, client = workers.fresh(), workers()
    victim.do(gpu_worker.attach, cfg=linked, mode="off")
    victim.do(write, path="block.weight", how="add")  # its own memory still
    answer = victim.do(gpu_worker.output)
    victim.do(gpu_worker.publish, cfg=linked)
    client.do(gpu_worker.attach, cfg=linked, variant="v")
    assert "CUDA" in victim.fails(write, path="embed", how="add").text
    assert client.do(gpu_worker.output) == answer
