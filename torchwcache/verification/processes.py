"""Run the two processes of a verification and compare what they say. Imports no torch, and sees no weights."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import IO, Any, Literal, NoReturn

import msgspec

from torchwcache import errors
from torchwcache.daemon.supervisor import child_environment
from torchwcache.errors import WeightCacheError
from torchwcache.module.difference import Difference
from torchwcache.verification.comparison import compare_descriptions, compare_outputs
from torchwcache.verification.messages import Answer, Failure, Order
from torchwcache.verification.record import VerificationRecord

__all__ = ["DEFAULT_TIMEOUT_S", "verify_in_processes"]

DEFAULT_TIMEOUT_S = 3600.0
"""How long each process may take."""
_RELAYED = ("ConfigError", "EntryNotFoundError", "DaemonTimeoutError", "DaemonUnavailable")
"""Errors with an exit code of their own; any other is told as what it is in words."""
_MODULE = "torchwcache.verification.child"


def verify_in_processes(
    model: Mapping[str, Any],
    *,
    socket: str,
    deep: bool = False,
    inputs: str | None = None,
    usual: Mapping[str, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> VerificationRecord:
    """Attach what is cached in one process, load afresh in another, and compare the two. Produces nothing.

    Args:
        model: Arguments that describe the model, as ``cli.model_arguments`` parses them.
        socket: The daemon's socket.
        deep: Also run both on the same inputs, and compare the answers.
        inputs: Where to take inputs from (see ``inputs_from``); generated when ``None``.
        usual: Values of ``model`` that the record need not repeat.
        timeout_s: How long each process may take.

    Raises:
        EntryNotFoundError: It is not cached.
        WeightCacheError: A process failed; says which, and why.
    """
    with _child("attach", model, socket, deep, inputs) as attaching, _child("load", model, socket, deep, inputs) as loading:
        deadline_s = time.monotonic() + timeout_s
        attached = attaching.answer(deadline_s)
        loaded = loading.answer(deadline_s)
    if attached.source == "disk":
        raise WeightCacheError("the attach was served from disk: there is nothing to compare")
    differences, compared = compare_descriptions(loaded.description, attached.description)
    differences += compare_outputs(loaded.outputs, attached.outputs)
    for name in sorted(loaded.versions.keys() & attached.versions.keys()):
        if loaded.versions[name] != attached.versions[name]:
            differences += (Difference(name, "version", loaded.versions[name], attached.versions[name]),)
    return VerificationRecord(
        checkpoint=str(model["checkpoint"]),
        model={k: v for k, v in model.items() if k != "checkpoint" and (usual is None or v != usual.get(k))},
        label=attached.label,
        fingerprint=attached.fingerprint,
        slot=attached.slot,
        deep=deep,
        inputs=inputs,
        compared=replace(
            compared, outputs=len(loaded.outputs), output_nbytes=sum(facts.nbytes for facts in loaded.outputs.values())
        ),
        ignored=loaded.description.ignored,
        versions=loaded.versions,
        seconds={"load": loaded.seconds, "attach": attached.seconds},
        differences=differences,
        when=datetime.now(UTC),
    )


class _Child:
    """One process, and what it wrote to its standard error."""

    def __init__(self, side: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.side, self.process, self.log = side, process, log

    def answer(self, deadline_s: float) -> Answer:
        """Wait for it."""
        try:
            said, _ = self.process.communicate(timeout=max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise WeightCacheError(
                f"the process that was to {self.side} the model did not end in time; --timeout allows more"
            ) from error
        try:
            answer = msgspec.msgpack.decode(said, type=Answer | Failure)
        except msgspec.MsgspecError as error:
            raise WeightCacheError(
                f"the process that was to {self.side} the model ended with {self.process.returncode} and no answer:\n{self.tail()}"
            ) from error
        if isinstance(answer, Failure):
            self.relay(answer)
        return answer

    def relay(self, failure: Failure) -> NoReturn:
        """Raise here what was raised there."""
        text = f"the process that was to {self.side} the model: {failure.text}"
        cause = WeightCacheError(failure.trace)
        for name in failure.kinds:
            if name in _RELAYED:
                kind: type[WeightCacheError] = getattr(errors, name)
                raise kind(text) from cause
        raise WeightCacheError(text if "WeightCacheError" in failure.kinds else f"{text} ({failure.kinds[0]})") from cause

    def tail(self) -> str:
        """The end of its log."""
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-4000:]


@contextlib.contextmanager
def _child(
    side: Literal["attach", "load"], model: Mapping[str, Any], socket: str, deep: bool, inputs: str | None
) -> Iterator[_Child]:
    order = Order(side=side, model=dict(model), socket=socket, deep=deep, inputs=inputs)
    # -P: the working directory is no place to import from, unless --build says so (`model_config` sees to that).
    command = [sys.executable, "-P", "-m", _MODULE]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command, env=child_environment(os.environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        ) as process,
    ):
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(msgspec.msgpack.encode(order))
            process.stdin = None  # communicate() would write to it
            yield _Child(side, process, log)
        finally:
            process.kill()
