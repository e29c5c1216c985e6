"""Every exception that torchwcache raises.

Each class is also the builtin that a caller would expect (``DaemonUnavailable`` is a ``ConnectionError``), carries the facts as
attributes, and survives pickling, so that it can cross a ``multiprocessing`` boundary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "AttachmentError",
    "BuildError",
    "CaptureError",
    "CheckpointChangedError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "CudaError",
    "DaemonAlreadyRunningError",
    "DaemonError",
    "DaemonTimeoutError",
    "DaemonUnavailable",
    "DetachedError",
    "EncodingError",
    "EntryNotFoundError",
    "FileLimitError",
    "FingerprintError",
    "ManifestError",
    "MismatchError",
    "NotAFunctionOfCheckpointError",
    "PluginError",
    "ProtocolError",
    "ProtocolVersionError",
    "RankError",
    "RebindError",
    "RefusedError",
    "SegmentError",
    "SegmentMemoryError",
    "StateDictError",
    "UnsupportedQuantizationError",
    "UntrustedSocketError",
    "WeightCacheError",
]


def _rebuild(cls: type[WeightCacheError], args: tuple[Any, ...], state: dict[str, Any]) -> WeightCacheError:
    error = cls.__new__(cls)
    error.args = args
    error.__dict__.update(state)
    return error


class WeightCacheError(Exception):
    """Base of everything torchwcache raises.

    Args:
        message: What happened, to what, and what to do about it.
        **facts: Kept as attributes of the exception, for programs that want to look.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.__dict__.update(facts)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


class _ProblemsError(WeightCacheError):
    """An error that lists places and reasons: ``problems`` is a tuple of ``(path, reason)``."""

    problems: tuple[tuple[str, str], ...]

    def __init__(self, message: str, *, problems: Iterable[tuple[str, str]] = (), **facts: Any) -> None:
        found = tuple(problems)
        lines = "".join(f"\n  - {path}: {reason}" for path, reason in found[:50])
        if len(found) > 50:
            lines += f"\n  ... and {len(found) - 50} more"
        super().__init__(message + lines, problems=found, **facts)


# ---- what the user wrote -----------------------------------------------------------------------------------------------------


class ConfigError(WeightCacheError, ValueError):
    """Raised when a configuration value is wrong or contradicts another."""


class PluginError(WeightCacheError, LookupError):
    """Raised when a loader, adapter or quantization method is missing, fails to import, or claims a taken name."""


class BuildError(WeightCacheError, RuntimeError):
    """Raised when the module cannot be built, or cannot be built on the meta device; ``__cause__`` holds the reason."""


# ---- the checkpoint ----------------------------------------------------------------------------------------------------------


class CheckpointError(WeightCacheError, ValueError):
    """Base of everything that is wrong with the files of a checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Raised when the checkpoint, its config, or a shard that its index names does not exist."""


class CorruptCheckpointError(CheckpointError):
    """Raised when a file is truncated, malformed, or names what it does not contain."""


class CheckpointChangedError(CheckpointError):
    """Raised when a file of the checkpoint changed while it was being read; nothing was published."""


class StateDictError(CheckpointError, RuntimeError):
    """Raised when the names, shapes or dtypes in the checkpoint do not fit the module (``strict``).

    Attributes:
        missing: Names that the module needs and the checkpoint lacks.
        unexpected: Names that the checkpoint has and the module lacks.
        mismatched: ``(name, reason)`` for tensors that do not fit.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[tuple[str, str], ...]

    def __init__(
        self,
        message: str,
        *,
        missing: Iterable[str] = (),
        unexpected: Iterable[str] = (),
        mismatched: Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message, missing=tuple(missing), unexpected=tuple(unexpected), mismatched=tuple(mismatched))


# ---- identity ----------------------------------------------------------------------------------------------------------------


class EncodingError(WeightCacheError, TypeError):
    """Raised when a value has no canonical form; ``path`` says where it was found."""

    path: str


class FingerprintError(WeightCacheError, TypeError):
    """Raised when the identity of a model cannot be established (an opaque closure, an unversioned object)."""


class MismatchError(WeightCacheError, LookupError):
    """Raised when the slot holds an entry under another fingerprint and ``on_mismatch="error"``.

    Attributes:
        differences: ``FieldDifference`` items: the field's path, the wanted value and the one that is cached.
    """

    differences: tuple[Any, ...]


# ---- capture, gate, rebind ---------------------------------------------------------------------------------------------------


class UnsupportedQuantizationError(WeightCacheError, ValueError):
    """Raised when the quantization is not on the allow-list.

    Attributes:
        method: The method's name as found, such as ``"gptq"`` or ``"float8 per tensor"``.
        module: Path of the module or tensor, or ``None`` when the config alone decided.
        verified: Names of the methods that may be cached.
    """

    method: str
    module: str | None
    verified: tuple[str, ...]


class NotAFunctionOfCheckpointError(WeightCacheError, ValueError):
    """Raised when a load made up tensors that the checkpoint does not hold and no seed was given, or left them without values."""


class CaptureError(_ProblemsError, ValueError):
    """Raised when a module holds state that a manifest cannot carry; ``problems`` lists each path and why."""


class RebindError(_ProblemsError, RuntimeError):
    """Raised when a module built here does not fit the manifest, or would be left incomplete."""


class RefusedError(WeightCacheError, RuntimeError):
    """Raised when the cache refuses this model and ``on_refused="error"``; ``reason`` and ``kind`` say why."""

    reason: str
    kind: str


class RankError(WeightCacheError, RuntimeError):
    """Raised when another rank of the same engine is gone, or stopped the start that all ranks have to make together."""


class AttachmentError(WeightCacheError, RuntimeError):
    """Raised when an attachment is used in a way it does not allow, such as entering it twice."""


class DetachedError(WeightCacheError, RuntimeError):
    """Raised when a module is used after its attachment was closed."""


# ---- memory ------------------------------------------------------------------------------------------------------------------


class ManifestError(WeightCacheError, ValueError):
    """Raised when a manifest is malformed or points outside its segments; ``path`` such as ``$.tensors[3].offset``."""

    path: str


class SegmentError(WeightCacheError, OSError):
    """Raised when a segment cannot be made, sealed or mapped, or is not what its entry says."""


class SegmentMemoryError(SegmentError, MemoryError):
    """Raised when there is not enough memory for a segment; nothing was published."""


class CudaError(SegmentError):
    """Raised when a CUDA driver call fails; ``call`` and ``code`` say which, and how (``CUDA_ERROR_...``)."""

    call: str
    code: str


# ---- the daemon --------------------------------------------------------------------------------------------------------------


class DaemonError(WeightCacheError):
    """Base of what can go wrong between a client and the daemon."""


class DaemonUnavailable(DaemonError, ConnectionError):
    """Raised when no daemon answers, or it went away in the middle of a request."""


class DaemonTimeoutError(DaemonError, TimeoutError):
    """Raised when the daemon, or the producer that it waits for, exceeded its bound."""


class ProtocolError(DaemonError, ConnectionError):
    """Raised when a peer sends what the protocol does not allow."""


class ProtocolVersionError(ProtocolError):
    """Raised when daemon and client speak different protocol versions."""


class UntrustedSocketError(DaemonError, PermissionError):
    """Raised when the socket, its folder or the peer behind it is not owned by this user, or is open to others."""


class DaemonAlreadyRunningError(DaemonError, FileExistsError):
    """Raised when a second daemon is started on a socket whose lock another one holds; ``pid`` is the holder's."""

    pid: int


class FileLimitError(DaemonError, OSError):
    """Raised when a process has no file descriptors left; says the limit (``ulimit -n``) and how many are needed."""


class EntryNotFoundError(DaemonError, LookupError):
    """Raised when a named entry is not in the cache."""
