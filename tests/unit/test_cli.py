"""The command line without a daemon: arguments, exit codes, one line for an error, text for people."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchwcache.cli import evict as evict_command
from torchwcache.cli import main
from torchwcache.cli import status as status_command
from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.humanize import duration, size
from torchwcache.cli.main import build_parser
from torchwcache.cli.model_arguments import model_config
from torchwcache.cli.report import report_lines
from torchwcache.config import Identity, Role
from torchwcache.errors import ConfigError
from torchwcache.wire.messages import DaemonStatus, EntryInfo, Evicted


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """main() sets up logging; other tests want theirs."""
    loggers = [logging.getLogger(name) for name in ("torchwcache", "torchwcache_nn")]
    before = [(logger.handlers[:], logger.level) for logger in loggers]
    yield
    for logger, (handlers, level) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)


def parsed(*argv: str) -> Any:
    return model_config(build_parser().parse_args(argv))


ENTRY = EntryInfo(
    key="0123456789abcdef" * 2, device="cpu", slot="/models/llama", label="LlamaForCausalLM bfloat16", memory="memfd",
    nbytes=3 << 29, segments=16, leases=2, age_s=4000.0, idle_s=2.0, hits=7, superseded=True,
)  # fmt: skip
STATUS = DaemonStatus(
    version="0.1.0", protocol=1, pid=42, uptime_s=90000.0, socket="/run/s", entries=1, leases=2, producing=0, waiting=0,
    refusals=0, nbytes=3 << 29, fds=30, fd_limit=1024, warnings=("it shares the life of a container",),
)  # fmt: skip


class FakeConnection:
    evicted: dict[str, Any]

    def __init__(self, *keys: str) -> None:
        self.keys = keys or (ENTRY.key,)

    def __enter__(self) -> FakeConnection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def status(self) -> DaemonStatus:
        return STATUS

    def entries(self) -> tuple[EntryInfo, ...]:
        import msgspec

        return tuple(msgspec.structs.replace(ENTRY, key=key) for key in self.keys)

    def evict(self, **which: Any) -> Evicted:
        self.evicted = which
        return Evicted(freed=(ENTRY.key,), pending=("f" * 32,), nbytes=1 << 20)


# ---- arguments ---------------------------------------------------------------------------------------------------------------


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == ExitCode.USAGE
    assert "usage: torchwcache" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "torchwcache 0.1.0\n"


def test_model_arguments() -> None:
    cfg = parsed(
        "load", "folder", "--build", "os.path:join", "--build-kwargs", '{"a": [1, null]}', "--dtype", "bfloat16",
        "--override", "rope_theta=1e6", "--override", 'rope_scaling={"type": "yarn"}', "--role", "draft", "--identity", "sampled",
        "--no-strict", "--seed", "3", "--trust-remote-code", "--finalize", "os.path:abspath",
    )  # fmt: skip
    assert (cfg.checkpoint, cfg.build, dict(cfg.build_kwargs)) == ("folder", "os.path:join", {"a": [1, None]})
    assert dict(cfg.overrides) == {"rope_theta": 1e6, "rope_scaling": {"type": "yarn"}}
    assert (cfg.role, cfg.identity, cfg.dtype, cfg.seed, cfg.strict) == (Role.DRAFT, Identity.SAMPLED, "bfloat16", 3, False)
    assert cfg.trust_remote_code
    assert cfg.finalize == "os.path:abspath"


def test_defaults_are_those_of_the_config() -> None:
    from torchwcache.config import ModelConfig

    assert parsed("load", "folder") == ModelConfig("folder")


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--build-kwargs", "[1]"], "expected a JSON object"),
        (["--build-kwargs", "{"], "not JSON"),
        (["--override", "rope_theta"], "NAME=JSON"),
        (["--override", "kind=yarn"], "quote strings"),
        (["--dtype", "int3"], "dtype"),
        (["--build", "nothing"], "package.module:name"),
    ],
)
def test_bad_model_arguments(argv: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parsed("load", "folder", *argv)


# ---- errors ------------------------------------------------------------------------------------------------------------------


def test_no_daemon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["status"], ["stop"], ["evict", "--all"]):
        assert main([*argv, "--socket", str(tmp_path / "none.sock")]) == ExitCode.NO_DAEMON
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("torchwcache: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("option", ["-v", "--debug"])
def test_traceback_only_on_request(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", option, "--socket", str(tmp_path / "none.sock")]) == ExitCode.NO_DAEMON
    assert "Traceback" in capsys.readouterr().err


def test_config_error_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "folder", "--dtype", "int3"]) == ExitCode.USAGE
    assert main(["status", "--socket", "/" + "x" * 200]) == ExitCode.USAGE


def test_load_refuses_to_warm_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHWCACHE_MODE", "off")
    assert main(["load", "folder"]) == ExitCode.USAGE
    assert "TORCHWCACHE_MODE" in capsys.readouterr().err


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(status_command, "run", interrupted)
    assert main(["status"]) == ExitCode.INTERRUPTED


def test_reader_of_the_output_has_gone() -> None:
    code = """
import sys
from torchwcache.cli import main, status
status.run = lambda args: print("x" * 100_000) or 0
sys.exit(main(["status"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        err = child.stderr.read()
    assert (child.returncode, err) == (ExitCode.ERROR, "")


# ---- what people read --------------------------------------------------------------------------------------------------------


def test_status_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_command, "connect", lambda args: FakeConnection())
    assert main(["status"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "daemon 0.1.0 (protocol 1), pid 42, up 1 d 1 h, /run/s"
    assert lines[2] == "warning: it shares the life of a container"
    assert lines[4].split() == ["KEY", "SIZE", "SEGMENTS", "LEASES", "HITS", "AGE", "IDLE", "MODEL", "SLOT"]
    assert lines[5].startswith(ENTRY.key + "  1.5 GiB  16")
    assert lines[5].endswith("LlamaForCausalLM bfloat16 (superseded)  /models/llama")


def test_status_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(status_command, "connect", lambda args: FakeConnection())
    assert main(["status", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["daemon"]["pid"] == 42
    assert found["entries"][0]["key"] == ENTRY.key


@pytest.mark.parametrize(
    ("argv", "asked"),
    [
        (["0123"], {"key": ENTRY.key, "slot": None, "everything": False, "refusals": False}),
        (["f" * 32, "--refusals"], {"key": "f" * 32, "slot": None, "everything": False, "refusals": True}),
        (["--slot", "/models/llama"], {"key": None, "slot": "/models/llama", "everything": False, "refusals": False}),
        (["--all", "--refusals"], {"key": None, "slot": None, "everything": True, "refusals": True}),
    ],
)
def test_evict(argv: list[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    connection = FakeConnection()
    monkeypatch.setattr(evict_command, "connect", lambda args: connection)
    assert main(["evict", *argv]) == ExitCode.OK
    assert connection.evicted == asked
    assert capsys.readouterr().out == f"freed 1 (1.0 MiB)\n{'f' * 32} is in use, and is freed when its last lease ends\n"


def test_evict_by_a_beginning(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(evict_command, "connect", lambda args: FakeConnection("aa" * 16, "ab" * 16))
    assert main(["evict", "a"]) == ExitCode.USAGE
    assert "2 keys" in capsys.readouterr().err
    assert main(["evict", "b"]) == ExitCode.NOT_FOUND
    assert main(["evict", "AB"]) == ExitCode.OK


def test_report_lines() -> None:
    facts = {
        "source": "disk", "published": True, "seconds": {"fingerprint": 0.001, "load": 2.0}, "total_s": 2.001,
        "mapped_nbytes": 1 << 30, "copied_nbytes": 10, "tensors": 5, "fingerprint": "ab" * 16,
        "differences": [{"path": "dtype", "wanted": "a", "cached": "b"}], "warnings": ["careful"],
    }  # fmt: skip
    assert report_lines(facts) == [
        "source       disk, and published",
        "seconds      2.00 s: fingerprint 1.0 ms, load 2.00 s",
        "mapped       1.0 GiB in 5 tensors, copied 10 B",
        f"fingerprint  {'ab' * 16}",
        "differs      dtype: wanted a, cached b",
        "warning      careful",
    ]


def test_sizes_and_durations() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 << 29, 5 << 40)] == ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB"]
    times = [duration(s) for s in (0.0004, 0.0994, 0.1, 59.0, 61, 3600 * 5, 86400 * 3)]
    assert times == ["0.4 ms", "99.4 ms", "0.10 s", "59.00 s", "1 min 1 s", "5 h 0 min", "3 d 0 h"]
