"""D2: what makes two pieces of code the same."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchwcache.errors import ConfigError, FingerprintError
from torchwcache.identity import origin
from torchwcache.identity.code import digest_callable, digest_class, tree_code_fields
from torchwcache.identity.origin import PYTHON, origin_of


def load(source: str, name: str = "user_code") -> types.SimpleNamespace:
    """Execute source as a module of the user's would be."""
    module = types.ModuleType(name)
    exec(compile(textwrap.dedent(source), f"/somewhere/{name}.py", "exec"), module.__dict__)
    return types.SimpleNamespace(**vars(module))


def differs(one: str, two: str, name: str = "f") -> bool:
    return digest_callable(getattr(load(one), name)) != digest_callable(getattr(load(two), name))


# ---- what is the same --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(x): return x + 1", "\n\n# a comment\ndef f(x):\n\n    return x + 1"),
        ("def f(x): return x + 1", "unrelated = object()\ndef g(): pass\ndef f(x): return x + 1"),
        ("def f(x): return x in {'a', 'b', 'c', 'd'}", "def f(x): return x in {'d', 'c', 'b', 'a'}"),
        ("K = {'a': 1, 'b': 2}\ndef f(x): return K", "K = {'b': 2, 'a': 1}\ndef f(x): return K"),
        ("def f(x): return x.shape\nshape = 1", "def f(x): return x.shape\nshape = 2"),
    ],
)
def test_what_code_does_counts_not_how_it_is_written(one: str, two: str) -> None:
    assert not differs(one, two)


MAKE = "def make(y):\n  def f(x): return x + y\n  return f\n"
PARTIAL = "import functools\ndef g(x, y): return x\n"
TENSOR = "import torch\ndef f(x): return t\n"


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("def f(x): return x + 1", "def f(x): return x + 2"),
        ("def f(x): return x + 1", "def f(x): return x + 1.0"),
        ("def f(x): return x, 1", "def f(x): return x, True"),
        ("def f(x): return x + 1", "def f(x): return x - 1"),
        ("def f(x): return x.a", "def f(x): return x.b"),
        ("def f(x=1): return x", "def f(x=2): return x"),
        ("def f(*, x=1): return x", "def f(*, x=2): return x"),
        ("def f(x): return x", "def f(x, y=None): return x"),
        ("def f(x): return lambda: x + 1", "def f(x): return lambda: x + 2"),
        ("def f(x):\n  try: return x\n  except ValueError: return 1", "def f(x):\n  try: return x\n  except TypeError: return 1"),
        ("K = 1\ndef f(x): return K", "K = 2\ndef f(x): return K"),
        ("K = [1, (2,)]\ndef f(x): return K", "K = [1, [2]]\ndef f(x): return K"),
        ("def h(x): return 1\ndef f(x): return h(x)", "def h(x): return 2\ndef f(x): return h(x)"),
        (
            "def a(x): return 1\ndef h(x): return a(x)\ndef f(x): return [h(y) for y in x]",
            "def a(x): return 2\ndef h(x): return a(x)\ndef f(x): return [h(y) for y in x]",
        ),
        (
            "class C:\n  def m(self): return 1\ndef f(x): return C().m()",
            "class C:\n  def m(self): return 2\ndef f(x): return C().m()",
        ),
        (MAKE + "f = make(1)", MAKE + "f = make(2)"),
        (PARTIAL + "f = functools.partial(g, y=1)", PARTIAL + "f = functools.partial(g, y=2)"),
        (TENSOR + "t = torch.tensor([1., 2.])", TENSOR + "t = torch.tensor([1., 3.])"),
        (TENSOR + "t = torch.arange(6)[2:4]", TENSOR + "t = torch.arange(6)[3:5]"),
        (TENSOR + "t = torch.zeros(2)", TENSOR + "t = torch.zeros(2, dtype=torch.int32)"),
        ("import torch\nd = torch.float16\ndef f(x): return d", "import torch\nd = torch.bfloat16\ndef f(x): return d"),
        ("import re\np = re.compile('a')\ndef f(x): return p", "import re\np = re.compile('a', re.I)\ndef f(x): return p"),
    ],
)  # fmt: skip
def test_what_changes_the_result_counts(one: str, two: str) -> None:
    assert differs(one, two)


CLASS = """
    from torch import nn
    def helper(x): return x * {factor}
    class Base(nn.Module):
        def base(self): return {base}
    class f(Base):
        constant = {constant}
        table = {{"x": {{"b", "a"}}}}
        def __init__(self, n=1):
            super().__init__()
            self.n = n
        @property
        def p(self): return {prop}
        @staticmethod
        def s(): return {static}
        @classmethod
        def c(cls): return {cls}
        def forward(self, x): return helper(x)
"""
FIELDS = {"factor": 1, "base": 1, "constant": 1, "prop": 1, "static": 1, "cls": 1}


@pytest.mark.parametrize("field", FIELDS)
def test_every_part_of_a_class_counts(field: str) -> None:
    one, two = CLASS.format(**FIELDS), CLASS.format(**{**FIELDS, field: 2})
    assert differs(one, two)
    assert not differs(one, one)
    assert digest_class(load(one).f) != digest_class(load(two).f)
    trees = [tree_code_fields(nn.Sequential(load(source).f())) for source in (one, two)]
    assert trees[0] != trees[1]


# ---- kinds of callables ------------------------------------------------------------------------------------------------------


class Callable:
    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.parts = [nn.Linear(2, 2)]

    def __call__(self, x: Any) -> Any:
        return x * self.scale

    def method(self, x: Any) -> Any:
        return x


def decorated(scale: float) -> Any:
    @torch.no_grad()
    @functools.lru_cache
    def inner(x: Any) -> Any:
        return x * scale

    return inner


def test_state_of_callables_counts() -> None:
    torch.manual_seed(0)
    one, two = Callable(1.0), Callable(1.0)
    two.parts[0].load_state_dict(one.parts[0].state_dict())
    assert digest_callable(one) == digest_callable(two)
    assert digest_callable(one.method) == digest_callable(two.method)
    with torch.no_grad():
        two.parts[0].weight[0, 0] += 1
    assert digest_callable(one) != digest_callable(two)
    assert digest_callable(one.method) != digest_callable(two.method)
    assert digest_callable(one) != digest_callable(one.method)
    assert digest_callable(decorated(1.0)) == digest_callable(decorated(1.0))
    assert digest_callable(decorated(1.0)) != digest_callable(decorated(2.0))


def test_a_name_is_what_it_names() -> None:
    assert digest_callable("torch.nn:Linear") == digest_callable(nn.Linear)
    assert digest_callable("torch.nn:Linear") != digest_callable("torch.nn:Bilinear")
    with pytest.raises(ConfigError, match="finalize"):
        digest_callable("no.such.module:f", what="finalize")


def test_cycles_end() -> None:
    looped = load("def f(x): return g(x)\ndef g(x): return f(x)\nclass C:\n  def m(self): return C, f")
    assert digest_callable(looped.f) == digest_callable(looped.f)
    assert digest_callable(looped.C)
    assert differs("def f(x): return g(x)\ndef g(x): return f(x)", "def f(x): return g(x)\ndef g(x): return f(x), 1")
    circular: list[Any] = []
    circular.append(circular)
    with pytest.raises(FingerprintError, match="contains itself"):
        digest_callable(functools.partial(print, circular))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: open(os.devnull), "TextIOWrapper"),  # noqa: SIM115 (closed below)
        (lambda: (x for x in ()), "generator"),
        (lambda: threading.local().__dict__.keys(), "dict_keys"),
        (lambda: memoryview(b""), "memoryview"),
    ],
)
def test_opaque_values_are_refused_with_place_and_way_out(value: Any, kind: str) -> None:
    opaque = value()
    try:
        with pytest.raises(FingerprintError, match=kind) as caught:
            digest_callable(lambda: opaque, what="finalize")
        for part in ("finalize closure 'opaque'", "build_kwargs", "code_version"):
            assert part in str(caught.value)
        vouched = digest_callable(lambda: opaque, "v1")
        assert vouched[0] == "code"
    finally:
        if hasattr(opaque, "close"):
            opaque.close()


def test_locks_and_loggers_are_no_obstacle() -> None:
    code = load(
        "import logging, threading\nlog = logging.getLogger('x')\nlock = threading.Lock()\n"
        "def f(x):\n  with lock: log.info('x')\n  return x"
    )
    assert digest_callable(code.f)[0] == "code"


def test_classes_ignore_opaque_globals() -> None:
    code = load("handle = (x for x in ())\nclass C:\n  def m(self): return handle\ndef f(): return handle")
    assert digest_class(code.C)[0] == "code"
    with pytest.raises(FingerprintError, match="generator"):
        digest_callable(code.f)


# ---- user modules ------------------------------------------------------------------------------------------------------------


def test_a_module_that_is_used_as_a_whole_is_digested_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = []
    for source in ("def h(x): return 1\n", "def h(x): return 2\n", "SCALE = 3\ndef h(x): return 2\n"):
        (tmp_path / "user_helpers.py").write_text(source)
        sys.modules.pop("user_helpers", None)
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        digests.append(digest_callable(load("import user_helpers\ndef f(x): return user_helpers.h(x)").f))
    assert len(set(digests)) == 3
    # Edited after it was imported: the new file does not pass for the old code.
    (tmp_path / "user_helpers.py").write_text("def h(x): return 1\n")
    assert digest_callable(load("import user_helpers\ndef f(x): return user_helpers.h(x)").f) not in digests
    sys.modules.pop("user_helpers")


# ---- versioned code ----------------------------------------------------------------------------------------------------------


def test_installed_code_is_named_by_its_version() -> None:
    from importlib.metadata import version

    assert digest_callable(nn.Linear) == ("distribution", "torch", version("torch"), "torch.nn.modules.linear:Linear")
    assert digest_callable(functools.reduce)[0] == "code"
    assert origin_of("json.decoder") == ("python", PYTHON)
    assert origin_of("collections") == ("python", PYTHON)


def test_our_own_editable_install_and_main_are_the_users() -> None:
    import torchwcache.config  # noqa: F401

    assert origin_of("torchwcache.config") is None
    assert origin_of("__main__") is None
    assert origin_of("transformers_modules.abc.modeling") is None


def test_a_local_folder_named_like_a_distribution_is_not_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hypothesis").mkdir()
    fake = types.ModuleType("hypothesis.fake")
    fake.__file__ = str(tmp_path / "hypothesis" / "fake.py")
    monkeypatch.setitem(sys.modules, "hypothesis.fake", fake)
    assert origin_of("hypothesis.fake") is None
    shadow = types.ModuleType("statistics")
    shadow.__file__ = str(tmp_path / "statistics.py")
    monkeypatch.setitem(sys.modules, "statistics", shadow)
    origin.origin_of.cache_clear()
    try:
        assert origin_of("statistics") is None
    finally:
        origin.origin_of.cache_clear()


def test_an_editable_distribution_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, url in (("frozen_dist", None), ("edited_dist", '{"url": "file:///x", "dir_info": {"editable": true}}')):
        info = tmp_path / f"{name}-3.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.2\n")
        if url is not None:
            (info / "direct_url.json").write_text(url)
        (tmp_path / f"{name}.py").write_text("def f(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_dist  # type: ignore[import-not-found]
    import frozen_dist  # type: ignore[import-not-found]

    assert digest_callable(frozen_dist.f) == ("distribution", "frozen_dist", "3.2", "frozen_dist:f")
    assert digest_callable(edited_dist.f)[0] == "code"


def test_a_distribution_of_another_name_is_found() -> None:
    import yaml  # type: ignore[import-untyped]

    assert digest_callable(yaml.safe_load)[:2] == ("distribution", "PyYAML")


# ---- trees and processes -----------------------------------------------------------------------------------------------------


def test_only_unique_classes_are_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchwcache.identity import codegraph

    walked: list[str] = []
    real = codegraph.Graph._class_record
    monkeypatch.setattr(
        codegraph.Graph, "_class_record", lambda self, cls, path: walked.append(cls.__qualname__) or real(self, cls, path)
    )
    cls = load(CLASS.format(**FIELDS)).f
    fields = tree_code_fields(nn.Sequential(*[cls() for _ in range(1000)], nn.Linear(1, 1)))
    assert sorted(walked) == ["Base", "f"]
    assert sorted(fields["classes"]) == ["user_code:Base", "user_code:f"]
    assert fields["distributions"].keys() == {"torch"}


def test_two_classes_of_one_name_both_count() -> None:
    one, two = (load(CLASS.format(**{**FIELDS, "prop": prop})).f for prop in (1, 2))
    assert tree_code_fields(nn.Sequential(one(), two())) != tree_code_fields(nn.Sequential(one(), one()))


SCRIPT = """
    import enum, functools, types
    import torch
    from torch import nn
    from torchwcache.identity.code import digest_callable, tree_code_fields

    class Color(enum.Enum):
        RED = "red"

    TABLE = {"b": {"z", "y", "x"}, "a": frozenset({1, "1", (2,)})}

    def helper(x): return TABLE[x] if x in {"p", "q", "r"} else Color.RED

    class Net(nn.Module):
        names = {"k", "j", "i"}
        def __init__(self, n=2):
            super().__init__()
            self.l = nn.Linear(n, n)
        def forward(self, x): return helper(x)

    class Call:
        def __init__(self):
            self.state = {"s": {"m", "n"}, "t": torch.arange(3.0), "fs": {helper, make}}
            self.space = types.SimpleNamespace(a={"u", "v"})
        def __call__(self): return Net()

    def make(y):
        def inner(**kwargs): return Net(y), TABLE
        return inner

    for item in (Net, helper, make({"e", "f", "g"}), lambda: Net(3), functools.partial(Net, n=3), Call(), Call().__call__):
        print(digest_callable(item))
    print(tree_code_fields(nn.Sequential(Net())))
"""


def test_digests_are_the_same_in_every_process(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    found = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1
    assert len(set(found.pop().splitlines())) == 8


# ---- the state of the user's own objects counts -------------------------------------------------------------------------------

_GLOBAL = """
class Settings:
    def __init__(self, **values):
        self.__dict__.update(values)

SETTINGS = Settings({values})

class Net:
    def __init__(self):
        self.table = [SETTINGS.scale] * 3
"""


@pytest.mark.parametrize("values", ["scale=2.0", "scale=1.0, names=['a']", "scale=Settings(x=1)", "scale=1.0, kind=int"])
def test_a_global_object_that_a_class_reads_counts_with_its_state(values: str) -> None:
    one = load(_GLOBAL.replace("{values}", "scale=1.0")).Net
    other = load(_GLOBAL.replace("{values}", values)).Net
    assert digest_class(one) == digest_class(load(_GLOBAL.replace("{values}", "scale=1.0")).Net)
    assert digest_class(one) != digest_class(other)


def test_what_is_large_in_a_global_object_counts_by_its_size() -> None:
    def digest(values: str) -> Any:
        return digest_class(load("import torch\n" + _GLOBAL.replace("{values}", values)).Net)

    assert digest("scale=[1] * 5000") == digest("scale=[2] * 5000") != digest("scale=[1] * 5001")
    assert digest("scale=torch.zeros(2)") != digest("scale=torch.ones(2)")
    assert digest("scale=torch.nn.Linear(2, 2)") == digest("scale=torch.nn.Linear(2, 2)")


def test_a_spawned_child_sees_the_same_script() -> None:
    main, child = (
        load(_GLOBAL.replace("{values}", "scale=1"), "__main__"),
        load(_GLOBAL.replace("{values}", "scale=1"), "__mp_main__"),
    )
    assert digest_class(main.Net) == digest_class(child.Net)


def test_what_comes_and_goes_in_a_global_object_does_not_count() -> None:
    def digest(values: str) -> Any:
        return digest_class(load("import threading\n" + _GLOBAL.replace("{values}", values)).Net)

    assert digest("scale=1.0, held={}") != digest("scale=2.0, held={}")
    assert digest("scale=1.0, held={'a': Settings()}") == digest("scale=1.0, held={'a': Settings(), 'b': Settings(y=1)}")
    assert digest("scale=1.0, thread=threading.Thread()") == digest("scale=1.0, thread=threading.Thread(name='other')")
