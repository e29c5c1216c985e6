"""Segments on a GPU under arbitrary sequences of what programs do with them; a fake driver keeps the books."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_cuda import MIB, CUresult, FakeDevice, FakeDriver, Left

from torchwcache.errors import SegmentError
from torchwcache.memory.cuda_driver import CudaDevice
from torchwcache.memory.cuda_mapping import CudaMapping, Reservation, Unmapping, create_segment, map_segments

CODES = [CUresult.CUDA_ERROR_OUT_OF_MEMORY, CUresult.CUDA_ERROR_INVALID_VALUE, CUresult.CUDA_ERROR_UNKNOWN]

ordinals, threads, picks = st.sampled_from([0, 1]), st.sampled_from([0, 1, 2]), st.integers(0, 1 << 16)
sizes = st.sampled_from([2 * MIB, 4 * MIB])
PLACE = 0x300000000000


class ByHand(Unmapping):
    """Looks again when it is told to, so that what happens depends on nothing else."""

    def _start_thread(self):
        pass


class Worker:
    """A thread that does what it is told, and keeps nothing of it: unlike one of a pool, which may be the last to let go."""

    def __init__(self):
        self._inbox, self._outbox = queue.SimpleQueue(), queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while (task := self._inbox.get()) is not None:
            error = result = None
            try:
                function, arguments, options = task
                result = function(*arguments, **options)
            except BaseException as raised:
                error = raised
            del task, function, arguments, options
            answer = [(result, error)]
            del result, error
            self._outbox.put(answer)
            del answer

    def do(self, function, *arguments, **options):
        self._inbox.put((function, arguments, options))
        del function, arguments, options
        result, error = self._outbox.get().pop()
        if error is not None:
            try:
                raise error
            finally:
                del error
        return result

    def end(self):
        self._inbox.put(None)
        self._thread.join()


class CudaMachine(RuleBasedStateMachine):
    make_unmapping = ByHand

    @initialize()
    def begin(self):
        self.fake = FakeDriver(FakeDevice(nbytes=64 * MIB), FakeDevice(uuid=b"\1" * 16, nbytes=64 * MIB))
        self.devices = [CudaDevice(self.fake, ordinal) for ordinal in range(2)]
        self.unmapping = self.make_unmapping(
            lambda device: any(device.is_capturing(stream) for stream in self.fake.streams(device.ordinal))
        )
        self.workers = [Worker() for _ in range(3)]
        # A thread that used no device yet, and one that works on each.
        for ordinal in range(2):
            self.do(1 + ordinal, self.fake.cuCtxPushCurrent, ordinal)
        self.committed: list[tuple[int, int, int, int]] = []
        self.reservations: dict[int, Reservation] = {}
        self.kept: list[list[CudaMapping]] = []
        self.captures: dict[int, int] = {}
        self.free_streams = iter(range(100, 1 << 30))
        self.failure: tuple[CUresult, int] | None = None
        self.refused_to_release = False

    def do(self, thread, function, *arguments, **options):
        return self.workers[thread].do(function, *arguments, **options)

    def make(self, thread, function):
        """In that thread, with whatever failure was asked for; ``None`` when it failed, and then nothing is left of it."""

        def run():
            if self.refused_to_release:
                gc.collect()  # as in ``teardown``: else any collection in the middle of this changes what is left
            before = self.fake.left()
            if self.failure is None:
                return function()
            code, after = self.failure
            with self.fake.failing(code, after=after) as failure:
                try:
                    return function()
                except SegmentError as error:
                    text = str(error)
                finally:
                    # What the driver refuses to let go of stays, until it is told again.
                    if failure.failed == "cuCtxPopCurrent":
                        self.fake.cuCtxPopCurrent()
                    elif failure.failed == "cuMemRelease":
                        self.refused_to_release = True
                        (handle,) = self.fake.handles()
                        self.fake.cuMemRelease(handle)
            assert self.fake.left() == before
            assert failure.failed is None or (failure.failed in text and code.name in text)
            return None

        try:
            return self.do(thread, run)
        except SegmentError:  # the device is full
            return None
        finally:
            self.failure = None

    def at_once(self, ordinal, function):
        """Within one context: a release before which it cannot be made current keeps the handle."""

        def run():
            with self.devices[ordinal].current():
                return function()

        return run

    @rule(thread=threads, ordinal=ordinals)
    def reserve(self, thread, ordinal):
        """What was there before is given back with what is mapped in it."""
        made = self.do(thread, Reservation, self.devices[ordinal], 3 << 30, PLACE)
        self.do(thread, self.reservations.update, {ordinal: made})

    @precondition(lambda self: self.reservations)
    @rule(thread=threads, pick=picks)
    def give_reservation_up(self, thread, pick):
        ordinal = sorted(self.reservations)[pick % len(self.reservations)]
        self.do(thread, self.reservations.__delitem__, ordinal)

    @rule(thread=threads, ordinal=ordinals, nbytes=sizes, inside=st.booleans())
    def create(self, thread, ordinal, nbytes, inside):
        device, within = self.devices[ordinal], self.reservations.get(ordinal) if inside else None
        action = self.at_once(ordinal, lambda: create_segment(device, nbytes, self.unmapping, within=within))
        if (made := self.make(thread, action)) is not None:
            fd, mapping = made
            self.committed.append((fd, ordinal, nbytes, mapping.address))
            self.kept.append([mapping])

    @precondition(lambda self: self.committed)
    @rule(thread=threads, chosen=st.lists(picks, min_size=1, max_size=3), wished=st.booleans(), other=st.booleans())
    def map(self, thread, chosen, wished, other):
        some = [self.committed[pick % len(self.committed)] for pick in chosen]
        ordinal = some[0][1]
        fds, _, lengths, places = map(list, zip(*(one for one in some if one[1] == ordinal), strict=True))
        device = self.devices[1 - ordinal if other else ordinal]
        wishes = places if wished else []
        if other:
            self.failure = None  # what is refused while something is undone stays
        made = self.make(thread, lambda: map_segments(device, fds, lengths, self.unmapping, wishes=wishes))
        assert made is None or not other
        if made is not None:
            mappings, ranges = made
            for address, nbytes in ranges:
                self.do(thread, device.set_access, address, nbytes, writable=False)
            self.kept.extend([mapping] for mapping in mappings)

    @precondition(lambda self: self.committed)
    @rule(pick=picks)
    def close_descriptor(self, pick):
        os.close(self.committed.pop(pick % len(self.committed))[0])

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def keep(self, pick):
        holders = self.kept[pick % len(self.kept)]
        holders.append(holders[0])

    @precondition(lambda self: self.kept)
    @rule(thread=threads, pick=picks)
    def drop(self, thread, pick):
        index = pick % len(self.kept)
        holders = self.kept[index]
        if len(holders) == 1:
            del self.kept[index]
        self.do(thread, holders.clear) if len(holders) == 1 else holders.pop()

    @precondition(lambda self: self.kept)
    @rule(thread=threads, pick=picks, once=st.sampled_from(["cuCtxSynchronize", "cuMemUnmap", "cuCtxPopCurrent"]), other=picks)
    def drop_inside_of_a_drop(self, thread, pick, once, other):
        """As a garbage collection does."""

        def collect(*arguments):
            del self.fake.before[once]
            if self.kept:
                self.kept.pop(other % len(self.kept))

        self.fake.before[once] = collect
        self.drop(thread, pick)
        self.fake.before.clear()

    @precondition(lambda self: self.kept)
    @rule(pick=picks)
    def launch(self, pick):
        (mapping, *_) = self.kept[pick % len(self.kept)]
        place = self.fake.mapped()[mapping.address]
        self.fake.launch(place.allocation.ordinal, mapping.address)

    @rule(ordinal=ordinals)
    def begin_capture(self, ordinal):
        stream = next(self.free_streams)
        self.captures[stream] = ordinal
        self.fake.begin_capture(ordinal, stream)

    @precondition(lambda self: self.captures)
    @rule(pick=picks)
    def end_capture(self, pick):
        stream = sorted(self.captures)[pick % len(self.captures)]
        del self.captures[stream]
        assert self.fake.end_capture(stream)

    @rule(thread=threads)
    def look_again(self, thread):
        done = self.do(thread, self.unmapping.drain)
        assert done == (len(self.unmapping) == 0)
        assert done or self.captures

    @rule(code=st.sampled_from(CODES), after=st.integers(0, 9))
    def fail_next(self, code, after):
        self.failure = (code, after)

    @invariant()
    def nothing_wrong_was_done(self):
        assert self.fake.faults == []
        assert self.fake.broken == []
        assert sorted(self.fake.left().contexts) == [1, 1]

    @invariant()
    def what_is_held_is_mapped_once(self):
        places = {holders[0].address for holders in self.kept}
        assert len(places) == len(self.kept)
        assert places <= set(self.fake.mapped())
        waiting = len(self.unmapping)
        assert len(self.fake.mapped()) == len(places) + waiting

    def teardown(self):
        if not hasattr(self, "fake"):
            return
        try:
            for fd, *_ in self.committed:
                os.close(fd)
            for stream in self.captures:
                self.fake.end_capture(stream)
            self.kept.clear()
            self.reservations.clear()
            if self.refused_to_release:
                gc.collect()  # the frames in which an exit stack raised refer to themselves
            assert self.unmapping.drain()
            assert (self.fake.faults, self.fake.broken) == ([], [])
            assert self.fake.left() == Left(contexts=(1, 1))
            assert [self.fake.used_nbytes(ordinal) for ordinal in range(2)] == [0, 0]
        finally:
            for worker in self.workers:
                worker.end()


class TestCuda(CudaMachine.TestCase):
    settings = settings(max_examples=150, stateful_step_count=40)


# ---- the machine can fail ----------------------------------------------------------------------------------------------------


class NeverWaits(ByHand):
    def _wait_for_kernels(self, device):
        try:
            return not self._is_capturing(device)
        except SegmentError:
            return True


class NeverAsks(ByHand):
    def _wait_for_kernels(self, device):
        with contextlib.suppress(SegmentError):
            device.synchronize()
        return True


class Forgets(ByHand):
    def _drain_locked(self):
        self._pending.clear()
        return True


class Repeats(ByHand):
    def add(self, *arguments):
        super().add(*arguments)
        with contextlib.suppress(Exception):
            super().add(*arguments)


@pytest.mark.parametrize("broken", [NeverWaits, NeverAsks, Forgets, Repeats])
def test_the_machine_finds(broken):
    class Broken(CudaMachine):
        make_unmapping = broken

    Broken.TestCase.settings = settings(
        max_examples=300, stateful_step_count=40, database=None, phases=[Phase.generate], report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        Broken.TestCase().runTest()
