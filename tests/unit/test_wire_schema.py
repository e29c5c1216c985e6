"""The wire schema, frozen. Change this list together with docs/protocol.md, and by its rules of evolution only."""

from __future__ import annotations

import re
import socket
import typing
from pathlib import Path

import msgspec
import pytest

from torchwcache.wire import failures, framing, messages

REQUESTS = {
    "attach": {
        "key": "Hex", "device": "Name", "slot": "Name", "family": "Hex", "fields": "bytes", "provisional": "bool = False",
        "produce": "bool = True", "wait_s": "Seconds = 600.0",
    },
    "progress": {"ticket": "int", "phase": "Name", "done": "Nbytes = 0", "total": "Nbytes = 0"},
    "commit": {
        "ticket": "int", "key": "Hex", "device": "Name", "slot": "Name", "family": "Hex", "fields": "bytes", "manifest": "bytes",
        "memory": "Literal['memfd', 'cuda']", "segments": "tuple[Nbytes, ...]", "label": "Name = ''",
    },
    "refuse": {"ticket": "int", "key": "Hex", "kind": "Name", "reason": "Text"},
    "abort": {"ticket": "int", "reason": "Text"},
    "list": {},
    "evict": {"key": "Hex | None = None", "slot": "Name | None = None", "everything": "bool = False", "refusals": "bool = False"},
    "make_room": {"device": "Name", "nbytes": "Nbytes"},
    "status": {},
    "stop": {},
}  # fmt: skip

REPLIES = {
    "hit": {
        "key": "Hex", "manifest": "bytes", "memory": "Literal['memfd', 'cuda']", "segments": "tuple[Nbytes, ...]", "waited": "bool",
    },
    "produce": {"ticket": "int", "others": "tuple[OtherEntry, ...]", "hash_first": "bool = False"},
    "miss": {"others": "tuple[OtherEntry, ...]", "hash_first": "bool = False"},
    "waiting": {"phase": "Name", "done": "Nbytes", "total": "Nbytes", "elapsed_s": "Age"},
    "refused": {"kind": "Name", "reason": "Text"},
    "committed": {"key": "Hex"},
    "aborted": {},
    "entries": {"entries": "tuple[EntryInfo, ...]"},
    "evicted": {"freed": "tuple[Hex, ...]", "pending": "tuple[Hex, ...]", "nbytes": "Nbytes"},
    "daemon_status": {
        "version": "Name", "protocol": "int", "pid": "int", "uptime_s": "Age", "socket": "Name", "entries": "int", "leases": "int",
        "producing": "int", "waiting": "int", "refusals": "int", "nbytes": "Nbytes", "fds": "int", "fd_limit": "int",
        "warnings": "tuple[Text, ...] = ()",
    },
    "stopping": {},
    "failure": {"code": "Name", "message": "Text", "protocol": "int = 1"},
}  # fmt: skip

PARTS = {
    "OtherEntry": {"key": "Hex", "fields": "bytes"},
    "EntryInfo": {
        "key": "Hex", "device": "Name", "slot": "Name", "label": "Name", "memory": "Name", "nbytes": "Nbytes", "segments": "int",
        "leases": "int", "age_s": "Age", "idle_s": "Age", "hits": "int", "superseded": "bool",
    },
}  # fmt: skip

BOUNDS = {
    "Hex": {"pattern": "^[0-9a-f]{32}$", "max_length": 32},  # `$` alone would let a newline through
    "Name": {"max_length": 4096},
    "Text": {"max_length": 65536},
    "Nbytes": {"ge": 0, "le": 2**60},
    "Seconds": {"ge": 0, "le": 7 * 86400},
    "Age": {"ge": 0},
}


def fields_of(cls: type[msgspec.Struct]) -> dict[str, str]:
    found = {}
    for field in msgspec.structs.fields(cls):
        text = str(cls.__annotations__[field.name]).replace('"', "'")
        found[field.name] = text if field.required else f"{text} = {field.default!r}"
    return found


def schema_of(union: object) -> dict[str, dict[str, str]]:
    return {str(cls.__struct_config__.tag): fields_of(cls) for cls in typing.get_args(union)}


def test_requests():
    assert schema_of(messages.Request) == REQUESTS


def test_replies():
    assert schema_of(messages.Reply) == REPLIES


@pytest.mark.parametrize("name", PARTS)
def test_parts(name):
    assert fields_of(getattr(messages, name)) == PARTS[name]


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds(name):
    meta = getattr(messages, name).__metadata__[0]
    set_ones = ("gt", "ge", "lt", "le", "pattern", "min_length", "max_length")
    assert {key: value for key in set_ones if (value := getattr(meta, key)) is not None} == BOUNDS[name]


def test_every_message_refuses_unknown_fields_and_is_named_by_its_tag():
    for cls in (*typing.get_args(messages.Request), *typing.get_args(messages.Reply)):
        assert cls.__struct_config__.forbid_unknown_fields
        assert cls.__struct_config__.tag_field == "type"
        assert cls.__struct_config__.frozen


def test_frame_constants():
    assert framing.MAGIC == b"TWCACHE\n"
    assert framing.HEADER_NBYTES == 16
    assert framing.FDS_PER_BATCH == 253
    assert framing.MAX_FDS == 4096
    assert framing.MAX_PAYLOAD_NBYTES == 2**28
    assert framing.MAX_REQUEST_NBYTES == 2**22
    assert messages.PROTOCOL_VERSION == 1


def test_the_failure_that_every_version_must_understand():
    payload = framing.encode(messages.Failure(code="protocol_version", message="m", protocol=1))
    assert payload == b"\x84\xa4type\xa7failure\xa4code\xb0protocol_version\xa7message\xa1m\xa8protocol\x01"


def test_the_freeze_can_fail():
    class Changed(msgspec.Struct, tag="status"):
        added: int = 0

    assert schema_of(typing.Union[Changed, messages.Stop]) == {"status": {"added": "int = 0"}, "stop": {}}
    assert schema_of(typing.Union[Changed, messages.Stop]) != {tag: REQUESTS[tag] for tag in ("status", "stop")}


# ---- docs/protocol.md --------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[2] / "docs/protocol.md").read_text()


def rows(heading: str) -> dict[str, str]:
    """The table under a heading: first cell to the rest of the line."""
    section = re.split(rf"^#+ {heading}$", PAGE, flags=re.MULTILINE)[1].split("\n#")[0]
    return dict(re.findall(r"^\| `(\w+)`[ †]* \|(.*)\|$", section, re.MULTILINE))


@pytest.mark.parametrize(("heading", "schema"), [("Requests", REQUESTS), ("Replies", REPLIES)])
def test_the_page_has_every_message_and_every_field(heading, schema):
    table = rows(heading)
    assert set(table) == set(schema)
    for tag, fields in schema.items():
        for name, text in fields.items():
            optional = r"\?" if " = " in text else ""
            assert re.search(rf"`{name}`{optional} |`{name}`.* as above", table[tag]), (tag, name)


def test_the_page_has_every_failure_code():
    code = "".join(path.read_text() for path in (Path(messages.__file__).parents[1] / "daemon").glob("*.py"))
    code += Path(framing.__file__).read_text()
    used = set(re.findall(r'code="(\w+)"', code)) | set(re.findall(r'_fail\(\s*[\w.]+,\s*"(\w+)"', code))
    used |= set(re.findall(r'self\._dismiss, "(\w+)"', code))
    assert set(rows("Failures")) == used
    assert used == set(re.findall(r"``(\w+)``", messages.Failure.__doc__.split("Codes:")[1]))


def test_the_page_has_the_exception_of_every_code():
    for code, rest in rows("Failures").items():
        error = failures.from_failure("/s", messages.Failure(code=code, message="m"), "status")
        assert rest.strip().endswith(f"`{type(error).__name__}`"), code


def test_the_page_shows_a_real_frame():
    block = re.search(r"```text\n(54 57.*?)```", PAGE, re.DOTALL).group(1)
    shown = bytes.fromhex("".join(re.match(r"[0-9a-f ]+?(?=   |$)", line).group() for line in block.splitlines()))
    writer, (ours, theirs) = framing.FrameWriter(), socket.socketpair()
    with ours, theirs:
        writer.push(framing.encode(messages.Status()))
        writer.flush(ours)
        assert theirs.recv(100) == shown
