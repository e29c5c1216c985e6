"""F21: what one process writes is its own. Nobody else sees it, and ``verify`` names it."""

from __future__ import annotations

import signal

import pytest
from support import worker


def write(here, *, name="model"):
    import torch

    with torch.no_grad():
        here.models[name].block.weight.copy_(torch.zeros(8, 8))
        here.models[name].embed[3] += 1


@pytest.mark.parametrize("writer", ["producer", "client"])
def test_a_write_stays_where_it_was_made(writer, workers, daemon, linked):
    producer, client, later = workers.several(3)
    producer.do(worker.attach, cfg=linked)
    client.do(worker.attach, cfg=linked)
    expected = client.do(worker.output)
    writing, other = (producer, client) if writer == "producer" else (client, producer)
    assert writing.do(worker.verify) == []
    writing.do(write)
    assert writing.do(worker.output) != expected
    assert other.do(worker.output) == expected
    later.do(worker.attach, cfg=linked)
    assert later.do(worker.output) == expected
    assert writing.do(worker.attach, cfg=linked, name="again")["source"] == "cache"
    assert writing.do(worker.output, name="again") == expected

    named = writing.do(worker.verify)
    assert {"block.weight", "embed", "head.weight"} <= set(named)
    assert not {name for name in named if name.startswith(("block.bias", "angles"))}
    assert other.do(worker.verify) == later.do(worker.verify) == writing.do(worker.verify, name="again") == []


def test_readonly_stops_the_writer_and_nobody_else(workers, daemon, linked, wait_until):
    producer, client, victim = workers(), workers(), workers.fresh()
    producer.do(worker.attach, cfg=linked)
    client.do(worker.attach, cfg=linked, access="readonly")
    report = victim.do(worker.attach, cfg=linked, access="readonly")
    assert (report["source"], report["warnings"]) == ("cache", [])
    expected = producer.do(worker.output)
    assert victim.do(worker.output) == client.do(worker.output) == expected, "reading is what it is for"
    victim.begin(write)
    assert victim.died_of() == signal.SIGSEGV
    wait_until(lambda: client.do(worker.entries)[0]["leases"] == 2, what="the victim's lease ends")
    assert client.do(worker.output) == producer.do(worker.output) == expected
    assert client.do(worker.attach, cfg=linked, name="again")["source"] == "cache"


def gradients(here, *, name="model"):
    return {path: parameter.requires_grad for path, parameter in here.models[name].named_parameters()}


@pytest.mark.parametrize("who", ["producer", "client", "disk"])
def test_no_parameter_requires_grad_unless_asked(who, workers, daemon, linked):
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg=linked)
    one = {"producer": producer, "client": client, "disk": client}[who]
    options = {"mode": "off"} if who == "disk" else {}
    if who != "producer":
        one.do(worker.attach, cfg=linked, **options)
    assert set(one.do(gradients).values()) == {False}
    one.do(worker.attach, cfg=linked, name="training", requires_grad=True, **options)
    assert set(one.do(gradients, name="training").values()) == {True}


def step(here, *, name="model"):
    """One step of training on an attached model."""
    import torch

    model = here.models[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(**worker.example_inputs(model))[0].sum().backward()
    optimizer.step()


def test_training_on_an_attached_model_is_private(workers, daemon, linked):
    producer, client = workers.several(2)
    producer.do(worker.attach, cfg=linked)
    expected = producer.do(worker.output)
    client.do(worker.attach, cfg=linked, requires_grad=True)
    client.do(step)
    assert client.do(worker.output) != expected
    assert "block.weight" in client.do(worker.verify)
    assert producer.do(worker.output) == expected


def test_readonly_stops_a_producer_that_writes_too(workers, daemon, linked):
    victim = workers.fresh()
    report = victim.do(worker.attach, cfg=linked, access="readonly")
    assert report["published"]
    victim.do(worker.output)
    victim.begin(write)
    assert victim.died_of() == signal.SIGSEGV
