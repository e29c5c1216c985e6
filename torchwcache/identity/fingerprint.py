"""The fingerprint: everything that a finished module state depends on, its digest, and the difference of two. Imports no torch.

Only values with a canonical form go in (``torchwcache.encoding``); anything else is an error that names the field, never the
name of a type. Two fingerprints are equal exactly when their canonical bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torchwcache.encoding import (
    Value,
    VDevice,
    VDict,
    VDType,
    VEntryDevice,
    VEnum,
    VList,
    VOrderedDict,
    VSize,
    VStr,
    VTorchConstant,
    VTuple,
    canonical_bytes,
    decode,
    encode,
    from_bytes,
)
from torchwcache.errors import EncodingError, FingerprintError

if TYPE_CHECKING:
    from torchwcache.adapter import Description
    from torchwcache.config import ModelConfig

__all__ = ["FieldDifference", "Fingerprint", "diff", "fingerprint_of", "slot_of"]

_ABSENT = "absent"
_SHOWN = 200
_INLINE_ITEMS = 8


class _Versioned(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field that two fingerprints do not agree on.

    Attributes:
        path: Such as ``config.rope_theta``.
        wanted: The value in the fingerprint that was asked for, as text (``repr``), or ``absent``.
        cached: The value in the fingerprint of the cached entry, likewise.
    """

    path: str
    wanted: str
    cached: str

    def __str__(self) -> str:
        return f"{self.path}: wanted {_shortened(self.wanted)}, cached {_shortened(self.cached)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The identity of one finished module state.

    Attributes:
        hex: xxh3-128 of the canonical bytes, 32 hex digits.
        family: The same without the checkpoint's content (the field ``checkpoint``).
        data: The canonical bytes themselves.
    """

    hex: str
    family: str
    data: bytes

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, entry_device: str | None = None) -> Fingerprint:
        """Make a fingerprint of nested fields.

        Args:
            fields: Names to values; mappings may nest. The order in which they were filled does not matter.
            entry_device: Name of the entry's own device (``"cuda:1"``): a value equal to it counts as "the entry's device".

        Raises:
            FingerprintError: A value has no canonical form; the message names the field.
        """
        try:
            value = encode(_plain(fields), path="fingerprint", entry_device=entry_device)
        except EncodingError as error:
            raise FingerprintError(
                f"{error}. Give a plain value (numbers, strings, tuples, lists, dicts, dtypes) there, or leave the field out",
                path=error.path,
            ) from error
        return cls._of(value)

    @classmethod
    def _of(cls, value: Value) -> Fingerprint:
        import xxhash

        assert isinstance(value, VDict)
        data = canonical_bytes(value)
        rest = VDict(tuple((key, item) for key, item in value.items if key != VStr("checkpoint")))
        return cls(xxhash.xxh3_128_hexdigest(data), xxhash.xxh3_128_hexdigest(canonical_bytes(rest)), data)

    def with_content(self, content: tuple[str, str]) -> Fingerprint:
        """The same model with another content of its checkpoint; see :func:`fingerprint_of`."""
        value = from_bytes(self.data)
        assert isinstance(value, VDict)
        checkpoint = encode({"content": tuple(content)})
        return self._of(VDict(tuple((key, checkpoint if key == VStr("checkpoint") else item) for key, item in value.items)))

    def encode(self) -> bytes:
        """Bytes for the daemon, which keeps them beside the entry for clients that want to know what differs."""
        return self.data

    @classmethod
    def decode(cls, data: bytes | memoryview) -> Fingerprint:
        """Read what :meth:`encode` gave, from a peer that is not trusted.

        Raises:
            EncodingError: Malformed bytes.
        """
        value = from_bytes(data)
        if not isinstance(value, VDict):
            raise EncodingError("a fingerprint must be a mapping of fields", path="$")
        return cls._of(value)


def _plain(value: Any) -> Any:
    """Read-only views of dicts (``ModelConfig`` keeps them so) count as the dicts they show."""
    if isinstance(value, Mapping) and type(value).__name__ in ("mappingproxy", "dict"):
        return {key: _plain(item) for key, item in value.items()}
    return value


def diff(wanted: Fingerprint, cached: Fingerprint) -> tuple[FieldDifference, ...]:
    """Every field that differs, in the order of the paths. Empty exactly when the two are equal."""
    found: list[FieldDifference] = []
    _compare("", from_bytes(wanted.data), from_bytes(cached.data), found)
    return tuple(sorted(found, key=lambda item: item.path))


def _compare(path: str, wanted: Value | None, cached: Value | None, found: list[FieldDifference]) -> None:
    # Bytes, not ``==``: NaN equals itself here, and 0.0 differs from -0.0.
    if wanted is not None and cached is not None:
        if canonical_bytes(wanted) == canonical_bytes(cached):
            return
        if isinstance(wanted, VDict) and isinstance(cached, VDict):
            left, right = _by_key(wanted), _by_key(cached)
            for key in sorted(left.keys() | right.keys()):
                a, b = left.get(key), right.get(key)
                _compare(_joined(path, (a or b)[0]), a and a[1], b and b[1], found)  # type: ignore[index]
            return
        if isinstance(wanted, (VList, VTuple)) and isinstance(cached, (VList, VTuple)) and _alike(wanted, cached):
            for i, (one, other) in enumerate(zip(wanted.items, cached.items, strict=True)):
                _compare(f"{path}[{i}]", one, other, found)
            return
    found.append(FieldDifference(path or "fingerprint", _text(wanted), _text(cached)))


def _by_key(value: VDict) -> dict[bytes, tuple[Value, Value]]:
    return {canonical_bytes(key): (key, item) for key, item in value.items}


def _joined(path: str, key: Value) -> str:
    if isinstance(key, VStr) and key.value and "." not in key.value:
        return f"{path}.{key.value}" if path else key.value
    return f"{path}[{_text(key)}]"


def _alike(wanted: VList | VTuple, cached: VList | VTuple) -> bool:
    same = type(wanted) is type(cached) and len(wanted.items) == len(cached.items)
    return same and not (_inline(wanted) and _inline(cached))


def _inline(value: VList | VTuple) -> bool:
    nested = any(isinstance(item, (VList, VTuple, VDict, VOrderedDict)) for item in value.items)
    return len(value.items) <= _INLINE_ITEMS and not nested


class _Text:
    """Stands in for a value that only torch, or a class that is not loaded here, could make."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _text(value: Value | None) -> str:
    if value is None:
        return _ABSENT
    if isinstance(value, VEnum):
        return f"{value.cls.rpartition(':')[2]}.{value.name}"
    try:
        return repr(decode(value, leaf=_leaf))
    except (EncodingError, TypeError):  # an enum nested in a container whose class is not loaded; an unhashable stand-in
        return str(value)


def _leaf(value: Value) -> object:
    match value:
        case VDType() | VTorchConstant():
            return _Text(f"torch.{value.name}")
        case VDevice():
            return _Text(f"device({value.name!r})")
        case VEntryDevice():
            return _Text("the entry's device")
        case VSize():
            return _Text(f"torch.Size({list(value.dims)})")
    return _Text(str(value))


def fingerprint_of(
    cfg: ModelConfig,
    description: Description,
    environment: Mapping[str, Any],
    *,
    content: tuple[str, str],
    variant: str | None,
    loader: _Versioned,
    adapter: _Versioned,
    quantization: str,
    entry_device: str | None = None,
) -> Fingerprint:
    """Put together the fingerprint of a model.

    Args:
        cfg: What the user asked for.
        description: What the adapter found out about the model without loading it.
        environment: See ``torchwcache.identity.environment``.
        content: The checkpoint's content, tagged: ``("full", hex)``, ``("sampled", hex)``, or ``("stat", hex)`` for the
            provisional key.
        variant: Name of what a caller publishes by hand, or ``None``.
        loader: Name and version of the loader.
        adapter: Name and version of the adapter.
        quantization: Name of the method that the gate found.
        entry_device: The entry's device as this process names it.

    Raises:
        FingerprintError: Something has no canonical form, or the identity of a callable cannot be established.
    """
    from torchwcache.identity.code import digest_callable

    hooks = (("build", cfg.build), ("build_meta", cfg.build_meta), ("finalize", cfg.finalize))
    fields = {
        "checkpoint": {"content": tuple(content)},
        "model": dict(description.fields),
        "build_kwargs": cfg.build_kwargs,
        "overrides": cfg.overrides,
        "code": {
            **{name: digest_callable(hook, cfg.code_version, what=name) for name, hook in hooks if hook is not None},
            "version": cfg.code_version,
        },
        "loader": (loader.name, loader.version),
        "adapter": (adapter.name, adapter.version),
        "dtype": cfg.dtype,
        "quantization": {"method": quantization, "config": _plain(description.quantization_config)},
        "parallel": cfg.parallel.identity(),
        "role": cfg.role.value,
        "strict": cfg.strict,
        "seed": cfg.seed,
        "variant": variant,
        # Both change the manifest that the bytes come with: what is carried, and what is shared.
        "ignore": cfg.ignore,
        "constants": tuple(sorted(cfg.constants)),
        "environment": dict(environment),
    }
    return Fingerprint.from_fields(fields, entry_device=entry_device)


_SLOT_CHARACTERS = 4096


def slot_of(cfg: ModelConfig, description: Description, device_id: str, adapter: str) -> str:
    """What an operator would call "the same model" in one engine: source, role, adapter, device and all parallel ranks.

    Args:
        cfg: The configuration.
        description: Holds the resolved path or repo id.
        device_id: ``"cpu"``, or a device UUID; never an index, which other processes may count differently.
        adapter: Its name. Two engines of different kinds do not mismatch: neither could ever use what the other has.
    """
    p = cfg.parallel
    axes = (("tp", p.tp_rank, p.tp_size), ("pp", p.pp_rank, p.pp_size), ("ep", p.ep_rank, p.ep_size), ("dp", p.dp_rank, p.dp_size))
    place = "|".join([cfg.role.value, adapter, device_id, *(f"{axis}{rank}/{size}" for axis, rank, size in axes)])
    source = description.source
    if len(source) + len(place) + 1 > _SLOT_CHARACTERS:  # the wire's limit for a name; the tail of a path tells more than its head
        import xxhash

        source = f"{xxhash.xxh3_128_hexdigest(source.encode(errors='surrogatepass'))}:{source[-1024:]}"
    return f"{source}|{place}"
