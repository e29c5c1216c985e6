"""Walk a loaded module and the same module as built on meta in pairs, and note every difference between them.

``pair`` answers one question: may the object that the build puts in this place stay there (with what was found *inside* it noted as
edits of its own), or must the place be given a new value? Only a place whose parent cannot be changed (an item of a tuple) passes
that question up.
"""

from __future__ import annotations

import enum
import fnmatch
import functools
import math
import types
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from torchwcache.adapter import CaptureRules
from torchwcache.encoding import (
    Encoder,
    Value,
    VDefine,
    VObject,
    VReference,
    VTensor,
    VTupleLike,
    VWeakref,
    encode,
    to_bytes,
)
from torchwcache.errors import EncodingError
from torchwcache.manifest import Edit, ObjectSpec, Step
from torchwcache.module.attributes import MISSING, attribute_names, built_attribute, encode_attribute
from torchwcache.module.graph import ATOMIC_TYPES, HOOK_DICTS, MODULE_TABLES, children, is_leaf, type_name
from torchwcache.module.opaque import OpaqueComparison, same_opaque, same_type
from torchwcache.module.tensors import TensorTable

__all__ = ["Pairing", "has_state"]

_REMOVED = object()
_MUTABLE = (list, dict, set, deque)
_STRUCT_BASES = msgspec.Struct.__mro__  # written in C, but what a Struct holds are slots
_MAX_DEPTH = 150  # four Python frames each


@dataclass(slots=True, eq=False)
class _Node:
    """An object of the built module that places are named after. ``index`` is its number in the manifest, once it has one."""

    loaded: Any
    built: Any
    parent: _Node | None
    kind: str
    key: Any
    path: str
    index: int | None = None
    edited: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Pending:
    node: _Node
    kind: str
    key: Any
    value: Any
    path: str
    contents: bool = False


class Pairing:
    """The paired walk. After :meth:`run`: ``edits`` with ``edit_paths``, ``object_specs``, ``tensor_attributes``, ``problems``.

    Args:
        module: As loaded.
        built: As built on meta.
        table: Filled with every tensor of ``module``.
        rules: What may be ignored.
    """

    def __init__(self, module: nn.Module, built: nn.Module, table: TensorTable, rules: CaptureRules) -> None:
        self.module, self.built, self.table, self.rules = module, built, table, rules
        self.problems: list[tuple[str, str]] = []
        self.integers: list[tuple[str, int]] = []
        self.edits: list[Edit] = []
        self.edit_paths: list[str] = []
        self.object_specs: list[ObjectSpec] = []
        self.tensor_attributes: list[tuple[tuple[tuple[str, Value], ...], tuple[str, ...]]] = []
        self.tree = list(module.named_modules(remove_duplicate=False))
        self.built_tree: list[nn.Module] = [item for _, item in built.named_modules(remove_duplicate=False)]
        self._mates: dict[int, _Node] = {}
        self._mated_built: dict[int, Any] = {}
        self._tuple_nodes: dict[type, _Node] = {}
        self._built_tensors: dict[int, tuple[torch.Tensor, _Node]] = {}
        self.arrays: list[tuple[str, int, int]] = []  # memory of NumPy arrays that the build makes too
        self._pending: list[_Pending] = []
        self._process_classes: dict[type, bool] = {}
        self._depth = 0
        self._encoder = _StateEncoder(self)

    # ---- the tree ------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk everything."""
        if not self._same_tree():
            return
        nodes: list[_Node] = []
        for number, ((path, loaded), built) in enumerate(zip(self.tree, self.built_tree, strict=True)):
            first = self._mates.get(id(loaded))
            if first is None:
                first = _Node(loaded, built, None, "", None, path, number)
                self._mates[id(loaded)] = first
                self._mated_built[id(built)] = loaded
                nodes.append(first)
        for node in nodes:
            self._tables(node)
        for node in nodes:
            self._attributes(node, node.loaded, node.built)
        for pending in self._pending:
            self._encode_edit(pending)
        self._encode_tensor_attributes()

    def _same_tree(self) -> bool:
        built = list(self.built.named_modules(remove_duplicate=False))
        loaded_paths, built_paths = dict(self.tree), dict(built)
        for path in loaded_paths.keys() - built_paths.keys():
            self.problem(path, f"the load added this module ({type_name(type(loaded_paths[path]))}); the build does not make it")
        for path in built_paths.keys() - loaded_paths.keys():
            self.problem(path, "the load removed this module")
        if [path for path, _ in self.tree] != [path for path, _ in built]:
            if not self.problems:
                self.problem("", "the load changed the order of the modules")
            return False
        mates: dict[int, nn.Module] = {}
        for path, loaded in self.tree:
            other = built_paths[path]
            if isinstance(loaded, torch.jit.ScriptModule):
                self.problem(path, "a ScriptModule keeps its state where Python cannot see it; publish the module it was made from")
            elif not same_type(type(loaded), type(other)):
                self.problem(path, f"the load made it a {type_name(type(loaded))}, the build makes a {type_name(type(other))}")
            elif mates.setdefault(id(loaded), other) is not other:
                self.problem(path, "the load shares this module with another path, the build does not")
        if len({id(m) for _, m in self.tree}) != len({id(m) for _, m in built}):
            self.problem("", "the build shares a module between two paths, the load does not")
        return not self.problems

    def _tables(self, node: _Node) -> None:
        prefix = f"{node.path}." if node.path else ""
        loaded, built = node.loaded, node.built
        for role, table in (("parameter", "_parameters"), ("buffer", "_buffers")):
            others = built.__dict__[table]
            holder = _Node(loaded.__dict__[table], others, node, "attribute", table, node.path)
            for name, tensor in loaded.__dict__[table].items():
                if tensor is None:
                    continue
                if not isinstance(tensor, torch.Tensor):
                    self.problem(prefix + name, f"a {type_name(type(tensor))} is registered as a {role}")
                    continue
                self._tensor(tensor, others.get(name), holder, "key", name, prefix + name, role)

    def _tensor(self, tensor: Any, built: Any, holder: _Node, kind: str, key: Any, path: str, role: Any) -> None:
        index = self.table.add(tensor, path, role)
        # Only the tables are filled with the tensor that the build put there still in sight (see ``inherited``).
        if role != "plain" and isinstance(built, torch.Tensor) and index not in self._built_tensors:
            self._built_tensors[index] = (built, _Node(tensor, built, holder, kind, key, path))

    # ---- pairs ---------------------------------------------------------------------------------------------------------------

    def problem(self, path: str, reason: str) -> None:
        """Note what cannot be carried."""
        self.problems.append((path or "(root)", reason))

    def ignored(self, path: str) -> bool:
        """Whether an attribute was declared ignorable."""
        return any(fnmatch.fnmatchcase(path, pattern) for pattern in self.rules.ignore)

    def _of_process(self, cls: type) -> bool:
        """Whether objects of a class are the process's, whatever model refers to them."""
        known = self._process_classes.get(cls)
        if known is None:
            names = self.rules.process
            known = self._process_classes[cls] = bool(names) and any(type_name(base) in names for base in cls.__mro__)
        return known

    def pair(self, a: Any, b: Any, parent: _Node, kind: str, key: Any, path: str) -> bool:
        """Whether the built object ``b`` may stay where the loaded module has ``a``; notes what differs inside."""
        if isinstance(a, torch.Tensor):
            self._tensor(a, b, parent, kind, key, path, "plain")
            return False
        if type(a) in ATOMIC_TYPES:
            if type(a) is int:
                self.integers.append((path, a))
            return _same_atom(a, b)
        if isinstance(a, enum.Enum):
            return a is b
        if is_leaf(a):
            return a is b or (isinstance(a, type) and isinstance(b, type) and same_type(a, b))
        if isinstance(a, weakref.ref):
            return self._pair_weakref(a, b, parent, kind, key, path)
        if a is b and self._of_process(type(a)):
            return True
        if isinstance(b, torch.Tensor) or not same_type(type(a), type(b)):
            return False
        mate = self._mates.get(id(a))
        if mate is not None:
            return mate.built is b
        if self._mated_built.get(id(b), a) is not a:
            return False  # the build shares one object where the load has two
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self.problem(path, "objects are nested too deeply here to be compared")
            self._depth -= 1
            return True
        try:
            same = self._pair_objects(_Node(a, b, parent, kind, key, path))
        finally:
            self._depth -= 1
        if not same:
            # What is to be replaced is no mate: it would be carried as a reference to the very object that it replaces.
            self._mates.pop(id(a), None)
            self._mated_built.pop(id(b), None)
        return same

    def _pair_objects(self, node: _Node) -> bool:
        a, b = node.loaded, node.built
        if isinstance(a, tuple):
            self._tuple_nodes.setdefault(type(a), node)
            if len(a) != len(b):
                return False
            # Every item is looked at, also after one that differs: the walk is what finds tensors.
            same = [self.pair(x, y, node, "index", i, f"{node.path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True))]
            return all(same)
        if isinstance(a, types.MethodType):
            same_function = self.pair(a.__func__, b.__func__, node, "function", None, f"{node.path}.__func__")
            return self.pair(a.__self__, b.__self__, node, "self", None, f"{node.path}.__self__") and same_function
        if isinstance(a, frozenset):
            return self._same_set(a, b)
        self._mates[id(a)] = node
        self._mated_built[id(b)] = a
        if isinstance(a, set):
            if not self._same_set(a, b):
                self._pending.append(_Pending(node, "key", None, a, node.path, contents=True))
        elif isinstance(a, dict):
            self._pair_dicts(node)
        elif isinstance(a, (list, deque)):
            self._pair_sequences(node)
        elif isinstance(a, types.FunctionType):
            return self._pair_functions(node)
        elif isinstance(a, functools.partial):
            return self._pair_partials(node)
        elif not has_state(a) and not self._pair_opaque(node):
            return False
        self._attributes(node, a, b)
        return True

    def _attributes(self, node: _Node, a: Any, b: Any) -> None:
        """Everything that is held by name: ``__dict__`` and slots."""
        theirs = {(kind, name): value for kind, name, value in children(b) if kind in ("attribute", "slot")}
        in_tree = node.parent is None
        for kind, name, value in children(a):
            if kind not in ("attribute", "slot") or (in_tree and name in MODULE_TABLES):
                continue
            path = f"{node.path}.{name}" if node.path else name
            if self.ignored(path):
                if _is_valueless(theirs.pop((kind, name), None)):
                    self.problem(path, "it is declared ignorable, but the build makes a tensor there that has no value in a client")
                continue
            if (kind, name) not in theirs:
                self._note(node, kind, name, value, path)
                continue
            other = theirs.pop((kind, name))
            if isinstance(a, nn.Module) and name in HOOK_DICTS:
                self._pair_hooks(_Node(value, other, node, kind, name, path))
            elif not self.pair(value, other, node, kind, name, path):
                self._note(node, kind, name, value, path)
        for kind, name in theirs:
            path = f"{node.path}.{name}" if node.path else name
            if not (in_tree and name in MODULE_TABLES) and not self.ignored(path):
                self._note(node, kind, name, _REMOVED, path)

    def _note(self, node: _Node, kind: str, key: Any, value: Any, path: str) -> None:
        self._pending.append(_Pending(node, kind, key, value, path))

    def _pair_hooks(self, node: _Node) -> None:
        loaded, built = list(node.loaded.values()), list(node.built.values())
        if len(loaded) != len(built):
            self.problem(node.path, f"the load left {len(loaded)} hooks here, the build {len(built)}; hooks cannot be carried")
            return
        for i, (a, b) in enumerate(zip(loaded, built, strict=True)):
            path = f"{node.path}[{i}]"
            if not self.pair(a, b, node, "hook", i, path):
                self._note(node, "hook", i, a, path)

    def _pair_sequences(self, node: _Node) -> None:
        a, b = list(node.loaded), list(node.built)
        if len(a) != len(b):
            self._pending.append(_Pending(node, "index", None, node.loaded, node.path, contents=True))
            return
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            path = f"{node.path}[{i}]"
            if not self.pair(x, y, node, "index", i, path):
                self._note(node, "index", i, x, path)

    def _pair_dicts(self, node: _Node) -> None:
        mine = {_key_token(key): key for key in node.loaded}
        theirs = {_key_token(key): key for key in node.built}
        # Keys that stay keep their places, new ones come last: any other order needs all contents to be put in anew.
        in_place = [token for token in theirs if token in mine] + [token for token in mine if token not in theirs]
        if list(mine) != in_place:
            self._pending.append(_Pending(node, "key", None, node.loaded, node.path, contents=True))
        for token, key in mine.items():
            value, path = node.loaded[key], f"{node.path}[{key!r}]"
            if token not in theirs or not self.pair(value, node.built[theirs[token]], node, "key", key, path):
                self._note(node, "key", key, value, path)
        for token, key in theirs.items():
            if token not in mine:
                self._note(node, "key", key, _REMOVED, f"{node.path}[{key!r}]")

    def _pair_functions(self, node: _Node) -> bool:
        a, b = node.loaded, node.built
        if a is b:
            return True
        if not _same_code(a.__code__, b.__code__):
            return False
        theirs = {(kind, key): value for kind, key, value in children(b)}
        mine = list(children(a))
        if {(kind, key) for kind, key, _ in mine} != theirs.keys():
            return False
        for kind, key, value in mine:
            path = f"{node.path}.<{kind} {key}>"
            if not self.pair(value, theirs[kind, key], node, kind, key, path):
                self._note(node, kind, key, value, path)
        return True

    def _pair_partials(self, node: _Node) -> bool:
        a, b = node.loaded, node.built
        if len(a.args) != len(b.args) or list(a.keywords) != list(b.keywords):
            return False
        if not self.pair(a.func, b.func, node, "function", None, f"{node.path}.func"):
            return False
        theirs = {(kind, key): value for kind, key, value in children(b)}
        for kind, key, value in children(a):
            path = f"{node.path}.<{kind} {key}>"
            if kind.startswith("partial_") and not self.pair(value, theirs[kind, key], node, kind, key, path):
                self._note(node, kind, key, value, path)
        self._attributes(node, a, b)
        return True

    def _pair_weakref(self, a: Any, b: Any, parent: _Node, kind: str, key: Any, path: str) -> bool:
        target, other = a(), b() if isinstance(b, weakref.ref) else None
        if target is None:
            return isinstance(b, weakref.ref) and other is None
        if isinstance(target, torch.Tensor) or other is None:
            return False
        return self.pair(target, other, _Node(a, b, parent, kind, key, path), "weakref", None, path)

    def _pair_opaque(self, node: _Node) -> bool:
        interface = getattr(node.loaded, "__array_interface__", None)
        if isinstance(interface, dict):
            start = int(interface["data"][0])
            self.arrays.append((node.path, start, start + node.loaded.nbytes))
        match same_opaque(node.loaded, node.built):
            case OpaqueComparison.SAME:
                return True
            case OpaqueComparison.DIFFERENT:
                return False  # the edit will try to encode it, and say that it cannot be carried
            case OpaqueComparison.UNKNOWN:
                self.problem(
                    node.path,
                    f"a {type_name(type(node.loaded))} is opaque: whether the load changed it cannot be established",
                )
        return True

    def _same_set(self, a: Any, b: Any) -> bool:
        if len(a) != len(b):
            return False
        theirs = {_key_token(item) for item in b}
        for item in a:
            mate = self._mates.get(id(item))
            if _key_token(mate.built if mate is not None else item) not in theirs:
                return False
        return True

    # ---- what was noted ------------------------------------------------------------------------------------------------------

    def node_index(self, node: _Node) -> int:
        """The manifest's number of an object, giving it one (and its parents theirs) when it has none yet."""
        if node.index is None:
            assert node.parent is not None
            parent = self.node_index(node.parent)
            step = Step(node.kind, encode(node.key, path=node.path))  # type: ignore[arg-type]
            node.index = len(self.built_tree) + len(self.object_specs)
            self.object_specs.append(ObjectSpec(parent, step, type_name(type(node.built))))
        return node.index

    def resolved_attributes(self, node: _Node) -> tuple[tuple[str, Value], ...]:
        """Plain attributes as the build resolved them and the load left them: the same in every process, or it must not serve."""
        found: list[tuple[str, Value]] = []
        for name in attribute_names(node.built):
            if name in node.edited or self.ignored(f"{node.path}.{name}" if node.path else name):
                continue
            try:
                value = encode_attribute(node.built.__dict__[name])
            except EncodingError:
                continue  # not a plain value: what is inside it has nodes of its own
            if value is not None:
                found.append((name, value))
        return tuple(found)

    def helper_nodes(self) -> Iterator[_Node]:
        """Objects with attributes that are not modules of the tree: configs and the like."""
        for node in list(self._mates.values()):
            if node.parent is not None and isinstance(getattr(node.built, "__dict__", None), dict) and has_state(node.built):
                yield node

    def mate_of(self, obj: Any) -> _Node | None:
        """The node of a loaded object that the build has too."""
        return self._mates.get(id(obj))

    def tuple_node(self, cls: type) -> _Node | None:
        """A node that holds a tuple of this class."""
        return self._tuple_nodes.get(cls)

    def _encode_edit(self, pending: _Pending) -> None:
        node = pending.node
        try:
            target = self.node_index(node)
            step = Step(pending.kind, encode(pending.key, path=pending.path))  # type: ignore[arg-type]
            value: Value | None = None
            if pending.contents:
                value = self._encoder.contents(pending.value, pending.path)
            elif pending.value is not _REMOVED:
                value = self._encoder.value(pending.value, pending.path)
        except EncodingError as error:
            self.problem(pending.path, str(error).removeprefix(f"{pending.path}: ") + self._hint(pending))
            return
        self.edits.append(Edit(target, step, value, pending.contents))
        self.edit_paths.append(pending.path)
        if pending.kind == "attribute":
            node.edited.add(pending.key)

    @staticmethod
    def _hint(pending: _Pending) -> str:
        return "; the load put it here" if pending.value is not _REMOVED else ""

    def _encode_tensor_attributes(self) -> None:
        done = 0
        while done < len(self.table.tensors):  # encoding an attribute may register another tensor
            tensor = self.table.tensors[done]
            built, node = self._built_tensors.get(done, (None, None))
            values: list[tuple[str, Value]] = []
            inherited: list[str] = []
            for name, value in list(tensor.__dict__.items()):
                path = f"{self.table.paths[done][0]}.{name}"
                if self.ignored(path):
                    continue
                try:
                    values.append((name, self._encoder.value(value, path)))
                except EncodingError as error:
                    theirs = MISSING if built is None else built_attribute(built, name)
                    before = len(self._pending)
                    if theirs is not MISSING and self.pair(value, theirs, node, "tensor_attribute", name, path):  # type: ignore[arg-type]
                        inherited.append(name)
                        for pending in self._pending[before:]:
                            self._encode_edit(pending)
                    else:
                        self.problem(path, str(error).removeprefix(f"{path}: "))
            self.tensor_attributes.append((tuple(values), tuple(inherited)))
            done += 1


class _StateEncoder(Encoder):
    """Encodes Python-side state: tensors by index, objects that the build makes by reference, new containers once."""

    def __init__(self, pairing: Pairing) -> None:
        super().__init__(entry_device=str(pairing.table.device))
        # Weakly: the pairing owns this encoder, and a cycle would keep every tensor of the model until a garbage collection.
        self._pairing = weakref.proxy(pairing)
        self._defined: dict[int, int] = {}
        self._alive: list[Any] = []  # ids are only good while their objects live

    def special(self, obj: Any, path: str) -> Value | None:
        if isinstance(obj, torch.Tensor):
            return VTensor(self._pairing.table.add(obj, path, "plain"))
        if type(obj) in ATOMIC_TYPES:
            if type(obj) is int:
                self._pairing.integers.append((path, obj))
            return None
        mate = self._pairing.mate_of(obj)
        if mate is not None:
            return VObject(self._pairing.node_index(mate))
        if isinstance(obj, weakref.ref):
            target = obj()
            if target is None:
                raise EncodingError(f"{path}: a weak reference to an object that is gone", path=path)
            return VWeakref(self.value(target, path))
        if isinstance(obj, tuple) and type(obj) is not tuple and type(obj) is not torch.Size:
            node = self._pairing.tuple_node(type(obj))
            if node is not None:
                return VTupleLike(self._pairing.node_index(node), self.items(obj, path))
        if type(obj) in _MUTABLE:
            return self._shared(obj, path)
        return None

    def _shared(self, obj: Any, path: str) -> Value:
        number = self._defined.get(id(obj))
        if number is not None:
            return VReference(number)
        number = self._defined[id(obj)] = len(self._defined)
        self._alive.append(obj)
        return VDefine(number, self.container(obj, path))

    def contents(self, obj: Any, path: str) -> Value:
        """What is inside a container that the build makes too."""
        for kind in _MUTABLE:
            if isinstance(obj, kind):
                plain = obj if type(obj) is kind else kind(obj)
                return self.container(plain, path)
        raise EncodingError(f"{path}: {type_name(type(obj))} has no contents", path=path)


def _same_atom(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if type(a) is float:
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    if type(a) is complex:
        return _same_atom(a.real, b.real) and _same_atom(a.imag, b.imag)
    if type(a) is slice:
        return _same_atom(a.start, b.start) and _same_atom(a.stop, b.stop) and _same_atom(a.step, b.step)
    return bool(a == b)


def has_state(obj: Any) -> bool:
    """Whether all that an object holds can be listed: attributes and slots, and no C base that keeps data to itself."""
    listed = _STRUCT_BASES if isinstance(obj, msgspec.Struct) else (types.SimpleNamespace,)
    if any(_is_written_in_c(base) and base not in listed for base in type(obj).__mro__[:-1]):
        return False
    return hasattr(obj, "__dict__") or any("__slots__" in base.__dict__ for base in type(obj).__mro__)


def _is_written_in_c(cls: type) -> bool:
    heap_type = 1 << 9
    # More and more of C's types are made at run time, as Python's are; but only they have a ``__new__`` that is not Python's own.
    return not cls.__flags__ & heap_type or isinstance(cls.__dict__.get("__new__"), types.BuiltinFunctionType)


def _is_valueless(value: Any, depth: int = 0) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_meta
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and depth < _MAX_DEPTH and any(_is_valueless(item, depth + 1) for item in value)


def _key_token(key: Any) -> Any:
    """What makes a key of a dict or a set the same in both modules: its value, or the very object."""
    try:
        return to_bytes(encode(key))
    except EncodingError:
        return id(key)


def _same_code(a: types.CodeType, b: types.CodeType) -> bool:
    return a is b or (a == b and a.co_filename == b.co_filename)
