"""Who dies when: nothing half-made is seen, nothing leaks, and whoever is left goes on."""

from __future__ import annotations

import signal
import sys

import pytest
from support import worker
from support.processes import descriptors_of, holders_of, segments_of

LIMITED_DAEMON = (
    "import sys\n"
    "from torchwcache.daemon import server\n"
    "from torchwcache.daemon.store import StoreLimits\n"
    "server.run(sys.argv[1], store_limits=StoreLimits(silence_s=float(sys.argv[2])))\n"
)
SILENCE_S = 1.5


@pytest.fixture
def impatient_daemon(start):
    """Takes a producer for dead after a short silence."""
    return start(lambda path: [sys.executable, "-c", LIMITED_DAEMON, path, str(SILENCE_S)])


def memfds_of(pid):
    return [link for link in descriptors_of(pid) if "memfd:" in link]


def count(daemon, what):
    with daemon.connect() as connection:
        return getattr(connection.status(), what)


# ---- producers ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["load", "capture", "publish"])
def test_a_producer_killed_before_its_commit_leaves_nothing(at, workers, daemon, linked, tmp_path, wait_until):
    producer, client, plain = workers.several(3)
    plain.do(worker.load_without_us, cfg=linked)
    before = len(descriptors_of(daemon.pid))

    producer.begin(worker.attach_and_stop, at=at, release=str(tmp_path / "never"), cfg=linked)
    producer.wait_for(at)
    assert client.do(worker.entries) == []
    client.begin(worker.attach, cfg=linked)
    wait_until(lambda: count(daemon, "waiting") == 1, what="the client waits for the producer")
    assert memfds_of(daemon.pid) == []

    producer.kill()
    report = client.result()
    assert (report["source"], report["published"]) == ("disk", True)
    assert client.do(worker.output) == plain.do(worker.output)
    assert client.do(worker.entries)[0]["leases"] == 1

    client.do(worker.close)
    with daemon.connect() as connection:
        assert len(connection.evict(everything=True).freed) == 1
    wait_until(lambda: len(descriptors_of(daemon.pid)) == before, what="the daemon has as many descriptors as before")


def test_memory_of_a_killed_producer_is_freed(workers, daemon, linked, tmp_path, wait_until):
    producer = workers()
    producer.begin(worker.attach_and_stop, at="publish", release=str(tmp_path / "never"), cfg=linked)
    producer.wait_for("publish")
    segments = segments_of(producer.pid)
    assert len(segments) == 1
    assert holders_of(segments) == {producer.pid}
    producer.kill()
    wait_until(lambda: holders_of(segments) == set(), what="nobody holds the memory")


def test_a_stopped_producer_is_replaced_and_uses_what_replaced_it(workers, impatient_daemon, linked, tmp_path, wait_until):
    producer, client = workers.several(2)
    release = tmp_path / "go"
    producer.do(worker.beat_often, seconds=0.1)
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked)
    producer.wait_for("load")
    client.begin(worker.attach, cfg=linked)
    wait_until(lambda: count(impatient_daemon, "waiting") == 1, what="the client waits for the producer")
    producer.signal(signal.SIGSTOP)
    report = client.result()
    assert (report["source"], report["published"]) == ("disk", True)

    release.touch()
    producer.signal(signal.SIGCONT)
    late = producer.result()
    assert (late["source"], late["published"], late["fingerprint"]) == ("cache", False, report["fingerprint"])
    assert producer.do(worker.output) == client.do(worker.output)
    (entry,) = client.do(worker.entries)
    assert entry["leases"] == 2


def test_a_slow_producer_that_gives_signs_of_life_is_waited_for(workers, impatient_daemon, linked, tmp_path):
    producer, client = workers.several(2)
    release = tmp_path / "go"
    producer.do(worker.beat_often, seconds=0.1)
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked)
    producer.wait_for("load")
    client.begin(worker.attach, cfg=linked)
    with pytest.raises(TimeoutError):
        client.result(timeout_s=2 * SILENCE_S)
    release.touch()
    assert producer.result()["published"]
    assert client.result()["source"] == "waited"


def test_a_wait_has_a_bound(workers, daemon, linked, tmp_path):
    producer, client = workers.several(2)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked)
    producer.wait_for("load")
    error = client.fails(worker.attach, cfg=linked, timeout_s=0.3, on_unavailable="error")
    assert error.type == "DaemonTimeoutError"
    assert "still being produced" in error.text
    report = client.do(worker.attach, cfg=linked, timeout_s=0.3)
    assert report["source"] == "disk"
    assert not report["published"]
    assert "DaemonTimeoutError" in report["warnings"][0]
    release.touch()
    assert producer.result()["published"]


# ---- clients -----------------------------------------------------------------------------------------------------------------


def test_a_killed_client_ends_its_lease(workers, daemon, linked, wait_until):
    producer, client, other = workers.several(3)
    for one in (producer, client, other):
        one.do(worker.attach, cfg=linked)
    assert other.do(worker.entries)[0]["leases"] == 3
    client.kill()
    wait_until(lambda: other.do(worker.entries)[0]["leases"] == 2, what="the dead client's lease ends")
    producer.kill()
    wait_until(lambda: other.do(worker.entries)[0]["leases"] == 1, what="the dead producer's lease ends")
    assert other.do(worker.output)
    assert other.do(worker.attach, cfg=linked, name="again")["source"] == "cache"


def test_a_killed_waiter_harms_nobody(workers, daemon, linked, tmp_path, wait_until):
    producer, dying, client = workers.several(3)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked)
    producer.wait_for("load")
    dying.begin(worker.attach, cfg=linked)
    wait_until(lambda: count(daemon, "waiting") == 1, what="one waits")
    client.begin(worker.attach, cfg=linked)
    wait_until(lambda: count(daemon, "waiting") == 2, what="two wait")
    dying.kill()
    wait_until(lambda: count(daemon, "waiting") == 1, what="one waits still")
    release.touch()
    assert producer.result()["published"]
    assert client.result()["source"] == "waited"


# ---- daemons -----------------------------------------------------------------------------------------------------------------


def test_clients_of_a_killed_daemon_go_on_and_a_new_one_starts(workers, daemon, linked):
    producer, client, later = workers.several(3)
    producer.do(worker.attach, cfg=linked)
    client.do(worker.attach, cfg=linked)
    expected = client.do(worker.output)
    daemon.kill()
    assert client.do(worker.output) == producer.do(worker.output) == expected
    assert client.do(worker.verify) == []

    report = later.do(worker.attach, cfg=linked)
    assert (report["source"], report["published"], report["warnings"]) == ("disk", True, [])
    assert later.do(worker.output) == expected
    client.do(worker.close)  # a lease of a daemon that is gone
    assert client.do(worker.attach, cfg=linked)["source"] == "cache"
    assert client.do(worker.output) == expected


@pytest.mark.parametrize("at", ["load", "capture", "publish"])
def test_a_daemon_killed_during_production(at, workers, daemon, linked, tmp_path):
    """The producer has a model: it serves that, and says why nobody else will get it."""
    producer, plain = workers.several(2)
    plain.do(worker.load_without_us, cfg=linked)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at=at, release=str(release), cfg=linked)
    producer.wait_for(at)
    daemon.kill()
    release.touch()
    report = producer.result()
    assert (report["source"], report["published"]) == ("disk", False)
    (warning,) = report["warnings"]
    assert "DaemonUnavailable" in warning
    assert "serving it unpublished" in warning
    assert producer.do(worker.output) == plain.do(worker.output)
    assert producer.do(worker.picture) == plain.do(worker.picture)


def test_a_daemon_killed_during_production_is_an_error_if_so_wished(workers, daemon, linked, tmp_path):
    producer = workers()
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked, on_unavailable="error")
    producer.wait_for("load")
    daemon.kill()
    release.touch()
    with pytest.raises(Exception, match="went away") as caught:
        producer.result()
    assert caught.value.type == "DaemonUnavailable"
    assert producer.do(worker.footprint)["memfds"] == 0


def test_a_daemon_killed_while_a_client_waits(workers, daemon, linked, tmp_path, wait_until):
    producer, client = workers.several(2)
    release = tmp_path / "go"
    producer.begin(worker.attach_and_stop, at="load", release=str(release), cfg=linked)
    producer.wait_for("load")
    client.begin(worker.attach, cfg=linked)
    wait_until(lambda: count(daemon, "waiting") == 1, what="the client waits")
    daemon.kill()
    report = client.result()
    assert report["source"] == "disk"
    assert "DaemonUnavailable" in report["warnings"][0]
    release.touch()
    assert not producer.result()["published"]
    assert client.do(worker.output) == producer.do(worker.output)
