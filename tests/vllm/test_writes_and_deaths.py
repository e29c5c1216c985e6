"""What would write into shared weights is refused; who dies takes nobody along."""

from __future__ import annotations

import os
import signal
import time

import pytest

from torchwcache.cache import DaemonCache

WRITES = {
    "reload_weights": [],
    "init_weight_transfer_engine": [{}],
    "start_weight_update": [],
    "start_draft_weight_update": [],
    "update_weights": [{}],
    "reset_weights": [],
    "elastic_ep_execute": ["receive_weights"],
}


def test_writes_are_refused_and_the_engine_goes_on(vllm, checkpoints):
    publisher = vllm(checkpoints("small"), wait=True)
    tokens = publisher.result()["tokens"]
    client = vllm(checkpoints("small"), wait=True)
    assert client.result()["tokens"] == tokens
    for engine in (publisher, client):
        for name, args in WRITES.items():
            answers = (
                engine.do(do="call", name="collective_rpc", args=[name], kwargs={"args": args}),
                engine.do(do="call_in_workers", name=name, args=args),
            )
            assert all("RefusedError" in answer["error"] and "Nothing was changed" in answer["error"] for answer in answers), name
        assert engine.do(do="generate")["tokens"] == tokens


@pytest.mark.parametrize("in_process", [True, False])
def test_a_refused_sleep_leaves_no_engine_paused(vllm, checkpoints, in_process):
    engine = vllm(checkpoints("small"), wait=True, in_process=in_process)
    tokens = engine.result()["tokens"]
    answer = engine.do(do="call", name="sleep", kwargs={"level": 2})
    assert "sleep level 2, which throws the weights away is refused" in answer["error"]
    assert engine.do(do="generate")["tokens"] == tokens
    assert "result" in engine.do(do="call", name="sleep", kwargs={"level": 1})
    assert "result" in engine.do(do="call", name="wake_up")
    assert engine.do(do="generate")["tokens"] == tokens


def test_an_engine_that_shares_nothing_may_sleep_as_it_likes(vllm, checkpoints):
    engine = vllm(checkpoints("small"), environment={"TORCHWCACHE_MODE": "off"}, wait=True)
    engine.result()
    assert "result" in engine.do(do="call", name="sleep", kwargs={"level": 2})


def test_lora_adapters_lie_beside_the_shared_weights(vllm, checkpoints):
    order = {"options": {"enable_lora": True, "max_lora_rank": 8}, "adapter": str(checkpoints("adapter"))}
    results = []
    for options, says in (({"load_format": "auto"}, None), ({}, "published"), ({}, ": hit: ")):
        engine = vllm(checkpoints("small"), **{**order, "options": {**order["options"], **options}})
        results.append(engine.result())
        assert says is None or says in engine.lines[0]
        engine.end()
    assert results[0]["tokens"] == results[1]["tokens"] == results[2]["tokens"]
    assert results[0]["adapted"] == results[1]["adapted"] == results[2]["adapted"]
    assert results[0]["adapted"][0] != results[0]["tokens"][0]


def test_an_engine_without_the_cache_may_reload(vllm, checkpoints):
    engine = vllm(checkpoints("small"), environment={"TORCHWCACHE_MODE": "off"}, wait=True)
    engine.result()
    answer = engine.do(do="call", name="collective_rpc", args=["reload_weights"])
    assert "is refused" not in str(answer)


def test_killed_engines_and_a_killed_daemon(vllm, run, checkpoints, private_socket, wait_until):
    publisher = vllm(checkpoints("small"), in_process=False, wait=True)
    tokens = publisher.result()["tokens"]
    client = vllm(checkpoints("small"), in_process=False, wait=True)
    assert client.result()["tokens"] == tokens
    cache = DaemonCache(private_socket, start=False)
    publisher.kill()
    wait_until(lambda: cache.entries()[0].leases == 1, what="the dead publisher's lease ends")
    assert client.do(do="generate")["tokens"] == tokens

    with open(private_socket + ".lock") as lock:
        daemon = int(lock.read().split()[0])
    os.kill(daemon, signal.SIGKILL)
    assert client.do(do="generate")["tokens"] == tokens
    again, lines = run(checkpoints("small"))  # a new daemon, an empty cache
    assert "published" in lines
    assert again == tokens
    assert client.do(do="generate")["tokens"] == tokens


def test_killed_in_the_middle_of_a_load(vllm, run, checkpoints, private_socket, wait_until):
    """Nothing half done is visible, and whoever comes next loads."""
    slow = vllm(checkpoints("dense"), stop_at="load")
    slow.result()  # it says that it is in the middle of it
    cache = DaemonCache(private_socket, start=False)
    assert cache.entries() == ()
    slow.kill()
    start = time.monotonic()
    _, lines = run(checkpoints("dense"))
    assert "published" in lines
    assert time.monotonic() - start < 120
    assert len(cache.entries()) == 1


def test_killed_in_the_middle_of_publishing(vllm, run, checkpoints, private_socket):
    slow = vllm(checkpoints("dense"), stop_at="publish")
    slow.result()
    cache = DaemonCache(private_socket, start=False)
    assert cache.entries() == ()
    slow.kill()
    _, lines = run(checkpoints("dense"))
    assert "published" in lines
    assert len(cache.entries()) == 1
