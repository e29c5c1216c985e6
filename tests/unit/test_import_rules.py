"""One direction of dependency (design, "Layout"): read from every file's imports, and checked in fresh processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("torchwcache", "adapters") for path in (ROOT / folder).rglob("*.py"))
ADAPTERS = ("torchwcache_nn", "torchwcache_vllm", "torchwcache_sglang")

TORCH_FREE = ("cli", "config", "daemon", "encoding", "errors", "manifest", "wire")
"""Importing these must not import torch. All but ``cli`` may not even do so later, inside a function."""

SOCKETS = ("torchwcache.cache", "torchwcache.cli", "torchwcache.daemon", "torchwcache.wire", "socket", "socketserver")
MODULES = ("torchwcache.module", "torchwcache.identity", "torchwcache.adapter")
KNOWS_NOTHING_OF: dict[str, tuple[str, ...]] = {
    "torchwcache": ADAPTERS,
    "torchwcache.memory": (*SOCKETS, *MODULES, "torchwcache.manifest", "torchwcache.loaders", "torch.nn"),
    "torchwcache.module": SOCKETS,
    "torchwcache.identity": (*SOCKETS, "torchwcache.memory"),
    "torchwcache.loaders": (*SOCKETS, "torchwcache.memory"),
    "torchwcache.quantization": (*SOCKETS, "torchwcache.memory"),
    "torchwcache.wire": ("torchwcache.cache", "torchwcache.cli", *MODULES),
    "torchwcache.daemon": ("torchwcache.cache", "torchwcache.cli", *MODULES, "torchwcache.manifest"),
    "torchwcache_nn": ("torchwcache.daemon", "torchwcache.wire", "torchwcache.cli"),
}
KINDS_OF_MEMORY = tuple(
    f"torchwcache.memory.{name}" for name in ("host", "cuda", "cuda_driver", "cuda_mapping", "staging", "reading")
)
NAMELESS = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}


@dataclass(frozen=True)
class Import:
    name: str
    line: int
    deferred: bool
    """Within a function: executed later, if at all."""
    typing_only: bool


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    start = 1 if parts[0] == "adapters" else 0
    return ".".join(part for part in parts[start:] if part != "__init__")


def imports_of(path: Path, source: str) -> Iterator[Import]:
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def walk(node: ast.AST, deferred: bool, typing_only: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            names: list[str] = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                names = [base, *(f"{base}.{alias.name}" for alias in child.names)]
            elif isinstance(child, ast.Call) and ast.unparse(child.func) in (
                "importlib.import_module",
                "import_module",
                "__import__",
            ):
                names = [arg.value for arg in child.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            yield from (Import(name, child.lineno, deferred, typing_only) for name in names)  # type: ignore[attr-defined]
            later = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            only = typing_only or (
                isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
            )
            yield from walk(child, later, only)

    return walk(ast.parse(source), False, False)


def violations(path: Path, source: str) -> list[str]:
    """What one file breaks; ``path`` is relative to the repository's root."""
    module = module_name(path)
    found = []
    if path.name in NAMELESS:
        found.append(f"{path}: name a file for what it does")
    for item in imports_of(path, source):
        where = f"{path}:{item.line}: {item.name}"
        for package, unknown in KNOWS_NOTHING_OF.items():
            if inside(module, package) and any(inside(item.name, name) for name in unknown):
                found.append(f"{where}: {package} knows nothing of it")
        for part in TORCH_FREE:
            lazily = part == "cli" and item.deferred
            if inside(module, f"torchwcache.{part}") and inside(item.name, "torch") and not item.typing_only and not lazily:
                found.append(f"{where}: {part} imports no torch")
        if any(inside(item.name, kind) for kind in KINDS_OF_MEMORY) and not inside(module, "torchwcache.memory"):
            found.append(f"{where}: only torchwcache.memory.select chooses a kind of memory")
    return sorted(set(found))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_the_rules(path: Path) -> None:
    assert violations(path.relative_to(ROOT), path.read_text()) == []


@pytest.mark.parametrize(
    ("path", "source", "reason"),
    [
        ("torchwcache/daemon/server.py", "import torch", "imports no torch"),
        ("torchwcache/daemon/server.py", "def f():\n    import torch.nn", "imports no torch"),
        ("torchwcache/config.py", "from torch import nn", "imports no torch"),
        ("torchwcache/cli/load.py", "import torch", "imports no torch"),
        ("torchwcache/cache.py", "import torchwcache_nn", "torchwcache knows nothing of it"),
        ("torchwcache/cache.py", "__import__('torchwcache_vllm.hooks')", "torchwcache knows nothing of it"),
        ("torchwcache/cache.py", "from torchwcache.memory import host", "chooses a kind of memory"),
        ("torchwcache/cache.py", "def f():\n    from torchwcache.memory.host import HostMemory", "chooses a kind of memory"),
        ("torchwcache/cache.py", "from .memory.host import HostMemory", "chooses a kind of memory"),
        ("torchwcache/cache.py", "from .memory import cuda", "chooses a kind of memory"),
        ("adapters/torchwcache_nn/adapter.py", "from torchwcache.memory.host import HostMemory", "chooses a kind of memory"),
        ("adapters/torchwcache_nn/__init__.py", "from torchwcache.wire import client", "torchwcache_nn knows nothing of it"),
        ("torchwcache/memory/host.py", "from torchwcache.module.capture import capture", "torchwcache.memory knows nothing of it"),
        ("torchwcache/memory/host.py", "from torch import nn", "torchwcache.memory knows nothing of it"),
        ("torchwcache/module/rebind.py", "import socket", "torchwcache.module knows nothing of it"),
        ("torchwcache/module/rebind.py", "from ..wire import client", "torchwcache.module knows nothing of it"),
        ("torchwcache/module/__init__.py", "from ..daemon import store", "torchwcache.module knows nothing of it"),
        ("torchwcache/module/utils.py", "", "name a file for what it does"),
    ],
)  # fmt: skip
def test_the_check_can_fail(path: str, source: str, reason: str) -> None:
    assert any(reason in line for line in violations(Path(path), source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("torchwcache/config.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("torchwcache/cli/load.py", "def run():\n    import torch"),
        ("torchwcache/memory/select.py", "def f():\n    from torchwcache.memory.host import HostMemory"),
        ("torchwcache/cache.py", "from torchwcache.memory.select import memory_for\nimport torch"),
    ],
)
def test_the_check_does_not_cry_wolf(path: str, source: str) -> None:
    assert violations(Path(path), source) == []


# ---- what is really imported -------------------------------------------------------------------------------------------------

REPORT = (
    "; import sys; print([name for name in ('torch', 'numpy', 'transformers', 'accelerate', 'safetensors') if name in sys.modules])"
)


def fresh(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_torch_free_modules_really_are() -> None:
    names = [module_name(path.relative_to(ROOT)) for path in SOURCES]
    chosen = ["torchwcache", *(name for name in names if any(inside(name, f"torchwcache.{part}") for part in TORCH_FREE))]
    assert len(chosen) > len(TORCH_FREE)
    assert fresh("import " + ", ".join(chosen) + REPORT) == "[]"


def test_that_check_can_fail() -> None:
    assert "torch" in fresh("import torchwcache.memory.host" + REPORT)


@pytest.mark.parametrize("command", [(), ("daemon",), ("load",), ("status",), ("verify",), ("evict",), ("stop",), ("demo",)])
def test_help_imports_no_torch(command: tuple[str, ...]) -> None:
    code = f"""
from torchwcache.cli import main
try:
    main([*{command!r}, "--help"])
except SystemExit as exit:
    assert not exit.code
"""
    assert fresh(code + REPORT.removeprefix("; ")).splitlines()[-1] == "[]"


def test_attaching_does_not_import_the_compiler() -> None:
    """It takes a second and 70 MB, in every process."""
    code = "import sys, torch, torchwcache.attaching, torchwcache_nn; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
