"""A module state in words and digests, so that two processes can compare theirs without sending weights. Imports no torch.

Everything is named by the path of the place where it is found. What is shared is described by the first of its paths, in an order
that does not depend on how a ``__dict__`` was filled: a load and a rebind fill it differently.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from torchwcache.encoding import Value
from torchwcache.errors import EncodingError

__all__ = [
    "ModuleDescription",
    "ModuleFacts",
    "OutputFacts",
    "StateFacts",
    "StorageFacts",
    "TensorFacts",
    "decode_description",
    "encode_description",
]


class ModuleFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One module of the tree, at one of its paths.

    Attributes:
        cls: ``"module:qualname"``.
        training: Its mode.
        parameters: Names in ``_parameters``, in order.
        buffers: Names in ``_buffers``, in order.
        modules: Names in ``_modules``, in order.
        transient: Names of buffers that ``state_dict`` leaves out, sorted.
        same_as: The first path of this module object.
    """

    cls: str
    training: bool
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    modules: tuple[str, ...]
    transient: tuple[str, ...]
    same_as: str


class TensorFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One place that holds a tensor.

    Attributes:
        kind: Which table of a module the place is in; ``plain`` for attributes, containers, closures.
        cls: The tensor's class; empty for ``torch.Tensor``.
        dtype: Such as ``"bfloat16"``.
        shape: Its sizes.
        stride: Its strides, in elements.
        device: Where it is.
        requires_grad: As it says.
        same_as: The first path of this tensor object.
        storage: The first path of a tensor over the same memory; empty without elements, or on the meta device.
        offset: Bytes from the first byte of that memory that any tensor views.
        digest: xxh3-128 of its elements in row-major order.
    """

    kind: Literal["parameter", "buffer", "plain"]
    cls: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    same_as: str
    storage: str
    offset: int
    digest: str


class StorageFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One piece of memory that tensors view.

    Attributes:
        nbytes: From the first byte that is viewed to the last.
        digest: xxh3-128 of these bytes; those that no tensor views count as zero.
        members: How many distinct tensor objects view it.
    """

    nbytes: int
    digest: str
    members: int


class StateFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One place that holds anything but a tensor.

    Attributes:
        kind: ``value`` is compared by ``value``; ``object`` by its type and what it holds, which has places of its own; ``opaque``
            by its type only, since nothing more can be said.
        type: ``"module:qualname"``.
        value: A plain value, the order of a dict's keys, or what else tells two objects of one type apart.
        same_as: The first path of this object; empty for values.
    """

    kind: Literal["value", "object", "opaque"]
    type: str
    value: Value | None = None
    same_as: str = ""


class OutputFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tensor of an answer.

    Attributes:
        dtype: Such as ``"float32"``.
        shape: Its sizes.
        nbytes: Its size.
        finite: Whether no element is infinite or NaN.
        digest: xxh3-128 of its elements in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    finite: bool
    digest: str


class ModuleDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that is compared.

    Attributes:
        modules: The tree, by path; a shared module under every path.
        tensors: Every place that holds a tensor, by path.
        storages: All memory, by the first path of a tensor over it.
        state: Every other place, by path.
        classes: Class attributes of the tree's classes, by ``"module:qualname.name"``.
        ignored: Patterns of paths that were left out, with the reason.
    """

    modules: dict[str, ModuleFacts]
    tensors: dict[str, TensorFacts]
    storages: dict[str, StorageFacts]
    state: dict[str, StateFacts]
    classes: dict[str, StateFacts]
    ignored: dict[str, str]


_encoder = msgspec.msgpack.Encoder()


def encode_description(description: ModuleDescription) -> bytes:
    """As msgpack."""
    return _encoder.encode(description)


def decode_description(data: bytes) -> ModuleDescription:
    """Read back what :func:`encode_description` wrote.

    Raises:
        EncodingError: It is something else.
    """
    try:
        return msgspec.msgpack.decode(data, type=ModuleDescription)
    except msgspec.MsgspecError as error:
        raise EncodingError(f"not the description of a module: {error}", path="$") from error
