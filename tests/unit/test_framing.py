from __future__ import annotations

import array
import contextlib
import os
import resource
import socket
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchwcache.errors import ProtocolError, ProtocolVersionError
from torchwcache.wire import framing
from torchwcache.wire.messages import PROTOCOL_VERSION, Abort, Attach, Commit, Failure, Status

HEADER = struct.Struct(">8sHHI")


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    theirs.setblocking(False)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def no_leak(open_fds):
    """The guard: whatever a test does with frames, it leaves no descriptor behind."""
    before = open_fds()
    yield
    assert not open_fds() - before


@contextlib.contextmanager
def pipes(count):
    """That many descriptors that can be told apart."""
    with contextlib.ExitStack() as stack:
        fds = []
        for number in range(count):
            fd = os.memfd_create(f"n{number}")
            stack.callback(os.close, fd)
            os.truncate(fd, number + 1)
            fds.append(fd)
        yield fds


def reader(limit=framing.reply_limit):
    return framing.FrameReader(limit)


def header(count=0, nbytes=0, *, version=PROTOCOL_VERSION, magic=b"TWCACHE\n"):
    return HEADER.pack(magic, version, count, nbytes)


def send_fds(sock, data, fds):
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def transfer(ours, theirs, payload, fds, into=None):
    writer, into = framing.FrameWriter(), into or reader()
    writer.push(payload, fds)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        writer.flush(ours)
        if (frame := into.read(theirs)) is not None:
            return frame
    pytest.fail("no frame arrived")


def test_the_header_is_what_the_protocol_says(pair):
    ours, theirs = pair
    writer = framing.FrameWriter()
    writer.push(b"payload")
    assert writer.flush(ours)
    assert theirs.recv(1000) == b"TWCACHE\n" + bytes([0, 1, 0, 0, 0, 0, 0, 7]) + b"payload"


@pytest.mark.parametrize("count", [0, 1, 2, 252, 253, 254, 506, 507, 1200])
def test_descriptors_arrive_in_order_and_close_on_exec(pair, no_leak, count):
    with pipes(count) as fds, transfer(*pair, b"some payload, longer than the number of batches", fds) as frame:
        assert frame.announced == count
        assert [os.fstat(fd).st_size for fd in frame.fds] == list(range(1, count + 1))
        assert not any(os.get_inheritable(fd) for fd in frame.fds)
        assert not frame.starved


def test_frames_back_to_back_keep_their_own_descriptors(pair, no_leak):
    ours, theirs = pair
    writer, into = framing.FrameWriter(), reader()
    with pipes(6) as fds:
        writer.push(b"one", fds[:2])
        writer.push(b"two")
        writer.push(b"three", fds[2:])
        assert writer.flush(ours)
    sizes = []
    for expected in (b"one", b"two", b"three"):
        with into.read(theirs) as frame:
            assert frame.payload == expected
            sizes.append([os.fstat(fd).st_size for fd in frame.fds])
    assert sizes == [[1, 2], [], [3, 4, 5, 6]]
    assert into.read(theirs) is None


def test_a_frame_may_come_byte_by_byte(pair, no_leak):
    ours, theirs = pair
    into = reader()
    with pipes(1) as fds:
        data = header(1, 5) + b"hello"
        send_fds(ours, data[:1], fds)
        for position in range(1, len(data)):
            assert into.read(theirs) is None
            assert into.partial
            ours.send(data[position : position + 1])
    with into.read(theirs) as frame:
        assert frame.payload == b"hello"
        assert len(frame.fds) == 1
    assert not into.partial


def test_short_writes_are_continued(pair, no_leak):
    ours, theirs = pair
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payload = os.urandom(3 * 2**20)
    with pipes(300) as fds, transfer(ours, theirs, payload, fds) as frame:
        assert frame.payload == payload
        assert len(frame.fds) == 300


def test_one_read_takes_a_bounded_bite(pair):
    ours, theirs = pair
    payload = bytes(32 * 2**20)
    done = threading.Event()

    def write():
        framing.send(ours, payload, (), time.monotonic() + 20)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    into, reads = reader(), 0
    while (frame := into.read(theirs)) is None:
        reads += 1
    thread.join(20)
    assert done.is_set()
    assert len(frame.payload) == len(payload)
    assert reads >= 7  # 32 MiB in bites of 4


@pytest.mark.parametrize(
    ("data", "error", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ProtocolError, "malformed"),
        (b"\x00", ProtocolError, "malformed"),
        (header(version=2, nbytes=3), ProtocolVersionError, "protocol_version"),
        (header(nbytes=framing.MAX_REQUEST_NBYTES + 1), ProtocolError, "too_large"),
        (header(1, framing.MAX_PAYLOAD_NBYTES + 1), ProtocolError, "too_large"),
        (header(0, 2**32 - 1), ProtocolError, "too_large"),
        (header(framing.MAX_FDS + 1, 10), ProtocolError, "too_large"),
        (header(2, 3) + b"abc", ProtocolError, "malformed"),
    ],
)
def test_what_the_header_may_not_say(pair, no_leak, data, error, code):
    ours, theirs = pair
    ours.send(data)
    into = reader(framing.request_limit)
    with pytest.raises(error) as caught:
        into.read(theirs)
    assert caught.value.code == code
    assert not into.partial


def test_only_frames_with_descriptors_may_be_large(pair, no_leak):
    ours, theirs = pair
    nbytes = framing.MAX_REQUEST_NBYTES + 1
    with pipes(1) as fds:
        send_fds(ours, header(1, nbytes), fds)
    into = reader(framing.request_limit)
    assert into.read(theirs) is None
    into.close()


def test_the_error_of_another_version_says_which(pair):
    ours, theirs = pair
    ours.send(header(version=7))
    with pytest.raises(ProtocolVersionError, match="version 7") as caught:
        reader().read(theirs)
    assert caught.value.peer == 7


@pytest.mark.parametrize("announced", [0, 1])
def test_unexpected_descriptors_are_closed(pair, no_leak, announced):
    ours, theirs = pair
    with pipes(2) as fds:
        send_fds(ours, header(announced, 3) + b"abc", fds)
    with pytest.raises(ProtocolError, match="announced, more received"):
        reader().read(theirs)


def test_descriptors_cannot_be_piled_up_behind_an_unfinished_header(pair, no_leak):
    ours, theirs = pair
    into = reader()
    with pipes(200) as fds:
        send_fds(ours, header()[:1], fds)
        assert into.read(theirs) is None
        send_fds(ours, header()[1:2], fds)
    with pytest.raises(ProtocolError, match="more file descriptors"):
        into.read(theirs)


@pytest.mark.parametrize(("data", "partial"), [(b"", False), (b"TWC", True), (header(0, 5) + b"he", True)])
def test_the_end_of_the_stream(pair, data, partial):
    ours, theirs = pair
    ours.send(data) if data else None
    ours.close()
    with pytest.raises(framing.PeerClosed) as caught:
        framing.receive(theirs, reader(), time.monotonic() + 5)
    assert caught.value.partial == partial


def test_descriptors_of_an_unfinished_frame_are_closed(pair, no_leak):
    ours, theirs = pair
    into = reader()
    with pipes(3) as fds:
        send_fds(ours, header(3, 5) + b"he", fds)
    assert into.read(theirs) is None
    ours.close()
    with pytest.raises(framing.PeerClosed):
        into.read(theirs)


def test_a_reader_that_is_closed_closes_what_it_holds(pair, no_leak):
    ours, theirs = pair
    into = reader()
    with pipes(3) as fds:
        send_fds(ours, header(3, 5) + b"he", fds)
    assert into.read(theirs) is None
    into.close()
    into.close()


def test_the_leak_guard_can_fail(open_fds):
    before = open_fds()
    fd = os.memfd_create("leak")
    assert open_fds() != before
    os.close(fd)
    assert open_fds() == before


def test_out_of_descriptors_is_told_apart_and_leaves_the_stream_in_step(pair, no_leak):
    ours, theirs = pair
    into, writer = reader(), framing.FrameWriter()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pipes(40) as fds:
        writer.push(b"too many for this process", fds)
        writer.push(b"the next one", fds[:1])
        writer.flush(ours)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(fds) + 20, before[1]))
        try:
            with into.read(theirs) as frame:
                assert frame.starved
                assert frame.fds == []
                assert frame.announced == 40
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    with into.read(theirs) as frame:
        assert not frame.starved
        assert (frame.payload, len(frame.fds)) == (b"the next one", 1)


def test_a_frame_closes_what_nobody_took(pair, no_leak):
    with pipes(3) as fds:
        frame = transfer(*pair, b"abc", fds)
    taken = frame.take()
    assert len(taken) == 3
    assert frame.take() == []
    frame.close()
    framing.close_fds(taken)
    with pipes(2) as fds:
        frame = transfer(*pair, b"abc", fds)
    frame.close()
    frame.close()


def test_closing_goes_on_after_a_descriptor_that_is_closed_already(no_leak):
    first, second = os.memfd_create("a"), os.memfd_create("b")
    os.close(first)
    framing.close_fds([first, second])


def test_waiting_has_a_bound(pair):
    ours, theirs = pair
    with pytest.raises(TimeoutError):
        framing.receive(theirs, reader(), time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        framing.send(ours, bytes(64 * 2**20), (), time.monotonic() + 0.05)


def test_what_is_over_a_cap_is_not_sent(pair):
    writer = framing.FrameWriter()
    with pytest.raises(ProtocolError, match="too large"):
        writer.push(bytes(framing.MAX_PAYLOAD_NBYTES + 1))
    with pytest.raises(ProtocolError, match="too large"):
        writer.push(b"x" * 100, range(framing.MAX_FDS + 1))
    assert writer.pending_nbytes == 0


@given(st.binary(max_size=200))
def test_no_bytes_decode_to_anything_but_a_message_or_a_protocol_error(data):
    for decode in (framing.decode_request, framing.decode_reply):
        with contextlib.suppress(ProtocolError):
            decode(data)


def test_every_truncation_of_a_message_is_refused():
    message = Attach(key="ab" * 16, device="cpu", slot="/models/x", family="cd" * 16, fields=b"fields")
    payload = framing.encode(message)
    assert framing.decode_request(payload) == message
    for length in range(len(payload)):
        with pytest.raises(ProtocolError):
            framing.decode_request(payload[:length])


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ({"type": "status", "surprise": 1}, "surprise"),
        ({"type": "evict", "key": "nothex"}, r"\$\.key"),
        ({"type": "make_room", "device": "cpu", "nbytes": -1}, r"\$\.nbytes"),
        ({"type": "make_room", "device": "x" * 5000, "nbytes": 1}, r"\$\.device"),
        ({"type": "no such request"}, r"\$\.type"),
        ({"type": "abort", "ticket": "1", "reason": ""}, r"\$\.ticket"),
    ],
)
def test_wrong_fields_are_refused_with_their_path(message, where):
    import msgspec

    with pytest.raises(ProtocolError, match=where):
        framing.decode_request(msgspec.msgpack.encode(message))


def test_replies_are_no_requests_and_requests_no_replies():
    with pytest.raises(ProtocolError):
        framing.decode_request(framing.encode(Failure(code="internal", message="x")))
    with pytest.raises(ProtocolError):
        framing.decode_reply(framing.encode(Status()))


def test_a_commit_decodes_from_the_readers_buffer(pair):
    commit = Commit(
        ticket=1,
        key="ab" * 16,
        device="cpu",
        slot="s",
        family="cd" * 16,
        fields=b"f",
        manifest=os.urandom(100_000),
        memory="memfd",
        segments=(1, 2),
    )
    with pipes(2) as fds, transfer(*pair, framing.encode(commit), fds) as frame:
        assert framing.decode_request(frame.payload) == commit


def test_a_file_name_that_is_no_text_can_be_sent():
    message = framing.decode_request(framing.encode(Abort(ticket=1, reason="/models/caf\udce9.safetensors: gone")))
    assert message.reason == "/models/caf\\udce9.safetensors: gone"
