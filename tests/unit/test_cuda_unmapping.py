"""Addresses on a GPU are given back once, after kernels, outside captures, and never noisily (D13); against a fake driver."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from support.fake_cuda import MIB, CUresult, FakeDevice, FakeDriver, Left

from torchwcache.memory import cuda_mapping
from torchwcache.memory.cuda_driver import CudaDevice
from torchwcache.memory.cuda_mapping import CudaMapping, Reservation, Unmapping, create_segment

NBYTES = 2 * MIB
STREAM = 9
BOUND_S = 10.0


class Gpus:
    """Two devices over a fake driver, and what gives their addresses back."""

    def __init__(self, make=Unmapping):
        self.fake = FakeDriver(FakeDevice(), FakeDevice(uuid=b"\1" * 16))
        self.devices = [CudaDevice(self.fake, ordinal) for ordinal in range(2)]
        self.unmapping = make(self.is_capturing)

    def is_capturing(self, device):
        return any(device.is_capturing(stream) for stream in self.fake.streams(device.ordinal))

    def mapping(self, ordinal=0, within=None):
        fd, mapping = create_segment(self.devices[ordinal], NBYTES, self.unmapping, within=within)
        os.close(fd)
        mapping.set_access(writable=False)
        return mapping

    def mappings(self, count, ordinal=0):
        return [self.mapping(ordinal) for _ in range(count)]

    def unmapped(self):
        return [call.arguments[0] for call in self.fake.named("cuMemUnmap")]

    def wait(self):
        """Until the thread that looks again is through."""
        thread = self.unmapping._thread
        if thread is not None and thread.ident is not None:
            thread.join(BOUND_S)
            assert not thread.is_alive()


class ByHand(Unmapping):
    """Looks again when it is told to."""

    def _start_thread(self):
        pass


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(cuda_mapping, "_LOOK_AGAIN_S", 0.002)
    made = Gpus()
    yield made
    made.wait()
    assert made.fake.faults == []
    assert made.fake.left() == Left()
    assert len(made.unmapping) == 0


@pytest.fixture
def by_hand():
    made = Gpus(ByHand)
    yield made
    assert made.fake.faults == []
    assert made.fake.left() == Left()
    assert len(made.unmapping) == 0


@pytest.fixture
def quiet(monkeypatch):
    """Fails when a finalizer or a thread complains."""
    said = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: said.append(repr(args.exc_value)))
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(repr(args.exc_value)))
    yield
    gc.collect()
    assert said == []


def in_thread(function):
    """Run it in a thread of its own, to the end."""
    failed = []

    def run():
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(BOUND_S)
    assert not thread.is_alive()
    if failed:
        raise failed.pop()


# ---- the last reference ------------------------------------------------------------------------------------------------------


def test_the_last_reference_unmaps_once(gpus):
    mapping = gpus.mapping()
    address, reserved = mapping.address, gpus.fake.reserved()
    other = mapping
    del mapping
    assert gpus.unmapped() == []
    begin = len(gpus.fake.calls)
    del other
    names = [call.name for call in gpus.fake.calls[begin:] if not call.name.startswith("cuCtxP")]
    assert names == ["cuStreamIsCapturing", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"]
    assert gpus.unmapped() == [address]
    assert [call.arguments for call in gpus.fake.named("cuMemAddressFree")] == [(address, reserved[address])]
    assert gpus.unmapping._thread is None, "nothing to look again for"


@pytest.mark.parametrize("current", [None, 0, 1])
@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("where", ["here", "thread"])
def test_it_unmaps_in_the_context_of_its_device(gpus, where, ordinal, current):
    holder = gpus.mappings(1, ordinal)

    def drop():
        if current is None:
            holder.clear()
        else:
            with gpus.fake.using(current):
                holder.clear()

    drop() if where == "here" else in_thread(drop)
    calls = gpus.fake.named("cuMemUnmap", "cuCtxSynchronize", "cuMemAddressFree")
    assert {call.context for call in calls} == {ordinal}
    assert len(calls) == 3


def test_kernels_are_waited_for_on_its_device_only(gpus):
    mapping, other = gpus.mapping(0), gpus.mapping(1)
    mine, theirs = gpus.fake.launch(0, mapping.address), gpus.fake.launch(1, other.address)
    del mapping
    assert (gpus.fake.is_running(mine), gpus.fake.is_running(theirs)) == (False, True)
    del other
    assert not gpus.fake.is_running(theirs)


def test_one_wait_serves_all_that_were_put_aside(by_hand):
    mappings = [*by_hand.mappings(3, 0), *by_hand.mappings(3, 1)]
    kernels = [by_hand.fake.launch(i // 3, mapping.address) for i, mapping in enumerate(mappings)]
    by_hand.fake.begin_capture(0, STREAM)
    by_hand.fake.begin_capture(1, STREAM + 1)
    mappings.clear()
    assert len(by_hand.unmapping) == 6
    assert all(map(by_hand.fake.is_running, kernels))
    by_hand.fake.end_capture(STREAM)
    by_hand.fake.end_capture(STREAM + 1)
    assert by_hand.unmapping.drain()
    assert len(by_hand.fake.named("cuCtxSynchronize")) == 2
    assert len(set(by_hand.unmapped())) == 6


# ---- captures ----------------------------------------------------------------------------------------------------------------


def given_back(gpus, address):
    """An event that is set when an address is."""
    event = threading.Event()
    gpus.fake.after["cuMemAddressFree"] = lambda freed, nbytes: event.set() if freed == address else None
    return event


@pytest.mark.parametrize("where", ["here", "thread"])
def test_a_capture_is_left_alone_and_waited_for(gpus, quiet, where):
    holder = gpus.mappings(1)
    event = given_back(gpus, holder[0].address)
    looked = threading.Semaphore(0)
    gpus.fake.begin_capture(0, STREAM)
    gpus.fake.after["cuStreamIsCapturing"] = lambda stream: looked.release()
    holder.clear() if where == "here" else in_thread(holder.clear)
    for _ in range(6):  # the first look, and some that the thread takes
        assert looked.acquire(timeout=BOUND_S)
    assert len(gpus.unmapping) <= 1  # 0 while the thread holds it
    assert gpus.fake.named("cuCtxSynchronize", "cuMemUnmap") == []
    assert not event.is_set()
    assert gpus.fake.end_capture(STREAM), "the graph is whole"
    assert event.wait(BOUND_S)
    assert gpus.fake.broken == []
    assert len(gpus.unmapped()) == 1


def test_whoever_comes_next_gives_back_what_was_put_aside(by_hand):
    mappings = by_hand.mappings(2)
    by_hand.fake.begin_capture(0, STREAM)
    del mappings[0]
    assert by_hand.unmapped() == []
    assert len(by_hand.unmapping) == 1
    by_hand.fake.end_capture(STREAM)
    mappings.clear()
    assert len(by_hand.unmapped()) == 2


def test_a_capture_on_one_device_holds_nothing_back_on_another(by_hand):
    mappings = [by_hand.mapping(0), by_hand.mapping(1)]
    by_hand.fake.begin_capture(0, STREAM)
    place = mappings[1].address
    mappings.clear()
    assert by_hand.unmapped() == [place]
    by_hand.fake.end_capture(STREAM)
    assert by_hand.unmapping.drain()


def test_a_capture_that_begins_before_the_wait_is_survived(gpus, quiet):
    mapping = gpus.mapping()
    event = given_back(gpus, mapping.address)
    kernel = gpus.fake.launch(0, mapping.address)

    def begin():
        del gpus.fake.before["cuCtxSynchronize"]
        gpus.fake.begin_capture(0, STREAM)

    gpus.fake.before["cuCtxSynchronize"] = begin
    del mapping
    assert gpus.fake.broken == [STREAM]
    assert gpus.unmapped() == []
    assert gpus.fake.is_running(kernel)
    assert not gpus.fake.end_capture(STREAM)
    assert event.wait(BOUND_S)
    assert gpus.fake.broken == [STREAM], "once is enough"


@pytest.mark.parametrize("call", ["cuStreamIsCapturing", "cuCtxSynchronize"])
@pytest.mark.parametrize("code", ["CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"])
def test_whatever_says_that_there_is_a_capture(by_hand, quiet, call, code):
    """A stream that torch does not know, or the default one, of which it is an error even to ask."""
    mapping = by_hand.mapping()
    by_hand.fake.launch(0, mapping.address)
    with by_hand.fake.failing(CUresult[code], name=call) as failure:
        del mapping
    assert failure.failed == call
    assert by_hand.unmapped() == []
    assert by_hand.unmapping.drain()


# ---- what goes wrong ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
@pytest.mark.parametrize("after", range(0, 12))
def test_a_dead_context_refuses_everything(quiet, code, after):
    gpus = Gpus()
    mappings = gpus.mappings(2)
    with gpus.fake.failing(CUresult[code], after=after, forever=True):
        mappings.clear()
    assert len(gpus.unmapping) == 0, "it goes with the process"
    assert gpus.unmapping._thread is None
    assert gpus.fake.faults == []


def test_a_kernel_that_failed(quiet):
    gpus = Gpus()
    mappings = gpus.mappings(2)
    gpus.fake.dead[0] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    mappings.clear()
    assert (len(gpus.unmapping), gpus.unmapped(), gpus.fake.left().contexts) == (0, [], ())


def test_one_that_cannot_be_unmapped_holds_back_no_other(by_hand, quiet):
    mappings = by_hand.mappings(2)
    by_hand.fake.begin_capture(0, STREAM)
    places = [mapping.address for mapping in mappings]
    while mappings:
        del mappings[0]
    by_hand.fake.end_capture(STREAM)
    with by_hand.fake.failing(CUresult.CUDA_ERROR_UNKNOWN, name="cuMemUnmap"):
        assert by_hand.unmapping.drain()
    assert by_hand.unmapped() == places[1:]
    assert by_hand.fake.left() == Left(mappings=1, reservations=1)
    by_hand.devices[0].unmap(places[0], NBYTES)
    by_hand.devices[0].free_addresses(places[0], cuda_mapping._LEAST_RESERVED_NBYTES)


def test_no_thread_can_be_started(gpus, quiet, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    mappings = gpus.mappings(2)
    gpus.fake.begin_capture(0, STREAM)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        del mappings[0]
    assert len(gpus.unmapping) == 1
    gpus.fake.end_capture(STREAM)
    mappings.clear()
    assert len(gpus.unmapped()) == 2


def test_no_thread_is_started_while_the_interpreter_ends(by_hand, monkeypatch):
    started = []
    monkeypatch.setattr(by_hand.unmapping, "_start_thread", lambda: started.append(1))
    mappings = by_hand.mappings(2)
    by_hand.fake.begin_capture(0, STREAM)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)
        del mappings[0]
        assert started == []
    mappings.clear()
    assert started == [1]
    by_hand.fake.end_capture(STREAM)
    assert by_hand.unmapping.drain()


@pytest.mark.parametrize("is_finalizing", [False, True])
def test_an_error_is_hidden_only_while_the_interpreter_ends(is_finalizing):
    class Broken:
        def add(self, *arguments):
            if not getattr(self, "mended", False):
                raise TypeError("'NoneType' object is not callable")

    broken = Broken()
    mapping = CudaMapping(Reservation(Gpus().devices[0], NBYTES), 0, 0, broken)
    if is_finalizing:
        mapping.__del__(is_finalizing=lambda: True)
    else:
        with pytest.raises(TypeError):
            mapping.__del__(is_finalizing=lambda: False)
    broken.mended = True


# ---- several at once ---------------------------------------------------------------------------------------------------------

INSIDE = [
    "cuStreamIsCapturing", "cuCtxPushCurrent", "cuCtxSynchronize", "cuCtxPopCurrent", "cuMemUnmap", "cuMemAddressFree",
]  # fmt: skip


@pytest.mark.parametrize("how", ["reference", "cycle"])
@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", INSIDE)
def test_a_finalizer_inside_of_another(gpus, quiet, name, when, ordinal, how):
    """A garbage collection may begin anywhere."""
    mapping = gpus.mapping()
    reservation = Reservation(gpus.devices[ordinal], NBYTES)
    holder = [[gpus.mapping(ordinal, within=reservation)]]
    if how == "cycle":
        holder[0].append(holder[0])
    else:
        del reservation
    hooks = getattr(gpus.fake, when)

    def collect(*arguments):
        del hooks[name]
        holder.clear()
        gc.collect()

    hooks[name] = collect
    del mapping
    assert name not in hooks
    gpus.wait()
    assert len(gpus.unmapped()) == len(set(gpus.unmapped())) == 2


def test_many_threads(gpus, quiet):
    threads, each = 8, 20
    kept = [[gpus.mapping(i % 2) for i in range(each)] for _ in range(threads)]
    barrier = threading.Barrier(threads)

    def drop(mine):
        barrier.wait(BOUND_S)
        while mine:
            mine.pop()

    running = [threading.Thread(target=drop, args=(mine,)) for mine in kept]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(BOUND_S)
    gpus.wait()
    assert len(gpus.unmapped()) == len(set(gpus.unmapped())) == threads * each


def test_an_adder_does_not_wait_for_another(gpus, quiet):
    """Who has the device waited for may be long about it."""
    first, second = gpus.mappings(1), gpus.mappings(1)
    inside, go_on = threading.Event(), threading.Event()

    def block():
        gpus.fake.before.pop("cuCtxSynchronize", None)
        inside.set()
        assert go_on.wait(BOUND_S)

    gpus.fake.before["cuCtxSynchronize"] = block
    thread = threading.Thread(target=first.clear)
    thread.start()
    assert inside.wait(BOUND_S)
    in_thread(second.clear)
    assert gpus.unmapped() == []
    go_on.set()
    thread.join(BOUND_S)
    gpus.wait()
    assert len(gpus.unmapped()) == 2


# ---- holes -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuMemUnmap"])
def test_a_mapping_added_after_the_wait_is_waited_for_too(name):
    """Another thread starts a kernel that reads it, and lets go, while this one is unmapping what came before."""
    gpus = Gpus()
    mapping, others = gpus.mapping(), gpus.mappings(1)

    def launch_and_drop():
        del gpus.fake.after[name]
        gpus.fake.launch(0, others[0].address)
        others.clear()

    gpus.fake.after[name] = lambda *arguments: in_thread(launch_and_drop)
    del mapping
    gpus.wait()
    assert others == []
    assert gpus.fake.faults == []
    assert gpus.fake.left() == Left()


def test_a_cycle_gives_all_back():
    gpus = Gpus()
    kept = gpus.mappings(2)
    kernel = gpus.fake.launch(0, kept[0].address)
    kept.append(kept)
    del kept
    gc.collect()
    assert not gpus.fake.is_running(kernel)
    assert len(gpus.unmapped()) == 2
    assert gpus.fake.faults == []
    assert gpus.fake.left() == Left()


def test_what_is_added_as_the_thread_ends_is_given_back_too(monkeypatch):
    """It has seen that nothing is left, and is still alive."""
    monkeypatch.setattr(cuda_mapping, "_LOOK_AGAIN_S", 0.002)

    class EndsSlowly(Unmapping):
        def drain(self):
            nothing_left = super().drain()
            if nothing_left and threading.current_thread() is first and others:
                gpus.fake.begin_capture(0, STREAM + 1)
                in_thread(others.clear)
            return nothing_left

    gpus, first = Gpus(EndsSlowly), None
    mapping, others = gpus.mapping(), gpus.mappings(1)
    event = given_back(gpus, others[0].address)
    gpus.fake.begin_capture(0, STREAM)
    del mapping
    first = gpus.unmapping._thread
    gpus.fake.end_capture(STREAM)
    first.join(BOUND_S)
    assert others == []
    gpus.fake.end_capture(STREAM + 1)
    found = event.wait(1)
    gpus.unmapping.drain()
    gpus.wait()
    assert found


@pytest.mark.parametrize("code", ["CUDA_ERROR_INVALID_HANDLE", "CUDA_ERROR_OUT_OF_MEMORY"])
def test_a_stream_that_cannot_be_asked_spares_no_wait(code):
    """torch's current stream may be one of somebody else's, who has destroyed it."""
    gpus = Gpus(ByHand)
    mapping = gpus.mapping()
    gpus.fake.launch(0, mapping.address)
    with gpus.fake.failing(CUresult[code], name="cuStreamIsCapturing"):
        del mapping
    gpus.unmapping.drain()
    assert gpus.fake.faults == []
    assert gpus.fake.left() == Left()


# ---- the end of a process ----------------------------------------------------------------------------------------------------

PRELUDE = """
import gc, os, sys, threading
from support.fake_cuda import MIB, CUresult, FakeDriver, Left
from torchwcache.memory.cuda_driver import CudaDevice
from torchwcache.memory.cuda_mapping import Unmapping, create_segment

fake = FakeDriver()
device = CudaDevice(fake, 0)
unmapping = Unmapping(lambda device: any(device.is_capturing(stream) for stream in fake.streams(0)))

def make():
    fd, mapping = create_segment(device, 2 * MIB, unmapping)
    os.close(fd)
    return mapping
"""


def python(code):
    """Run it with :data:`PRELUDE`; everything that it says, and how it ended."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.stdout, ended.stderr, ended.returncode


HOLDERS = {
    "global": "kept = make()",
    "cycle": "kept = [make()]; kept.append(kept); del kept; gc.disable()",
    "module": "sys.kept = make()",
    "thread": """
        def hold(mapping, started):
            started.set()
            threading.Event().wait()
        started = threading.Event()
        threading.Thread(target=hold, args=(make(), started), daemon=True).start()
        started.wait()
        """,
    "capture": "kept = make(); fake.begin_capture(0, 9)",
    "put aside": "fake.begin_capture(0, 9); make()",
    "error": """
        def fail(device, is_finalizing=sys.is_finalizing):
            if is_finalizing():
                raise TypeError("'NoneType' object is not callable")
            return False
        unmapping._is_capturing = fail
        sys.kept = make()
        """,
    "dead": "kept = make(); fake.dead[0] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS",
}


@pytest.mark.parametrize("how", HOLDERS)
def test_an_interpreter_ends_in_silence(how):
    assert python(textwrap.dedent(HOLDERS[how])) == ("", "", 0)


@pytest.mark.parametrize("how", ["deleted", "at its end"])
def test_a_forked_child_does_nothing(how):
    child = "del kept; gc.collect(); os._exit(len(fake.calls) - before)" if how == "deleted" else "watch(); sys.exit()"
    found = python(
        f"""
        kept = make()
        before = len(fake.calls)

        class AtTheEnd:
            def __init__(self, mapping, write=os.write, fake=fake, before=before):
                self.mapping, self.write, self.fake, self.before = mapping, write, fake, before
            def __del__(self):
                del self.mapping
                self.write(1, b"calls" if len(self.fake.calls) != self.before else b"")

        def watch():
            global kept
            sys.kept = AtTheEnd(kept)
            kept = None

        if (pid := os.fork()) == 0:
            {child}
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status))
        print(fake.left() == Left(mappings=1, reservations=1), len(fake.calls) == before)
        del kept
        print(fake.left() == Left())
        """
    )
    assert found == ("0\nTrue True\nTrue\n", "", 0)


def test_a_child_forked_while_something_is_put_aside_does_nothing():
    found = python(
        """
        import warnings
        warnings.simplefilter("ignore")  # of fork with threads
        fake.begin_capture(0, 9)
        kept = make()
        make()
        before = len(fake.named("cuCtxSynchronize", "cuMemUnmap"))
        if (pid := os.fork()) == 0:
            fake.end_capture(9)
            del kept
            os._exit(len(fake.named("cuCtxSynchronize", "cuMemUnmap")) - before)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status))
        fake.end_capture(9)
        del kept
        unmapping._thread.join(10)
        print(fake.left() == Left(), fake.faults)
        """
    )
    assert found == ("0\nTrue []\n", "", 0)
