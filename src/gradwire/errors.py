"""Everything gradwire raises on purpose.

::

    GradwireError
    ├── ConfigError         (also ValueError)       a bad codec string, parameter or argument
    ├── WireError           (also ValueError)       bytes that are not a valid payload
    ├── NonFiniteError      (also ArithmeticError)  NaN or Inf where a gradient was expected
    ├── PeerError           (also RuntimeError)     another rank failed, or disagrees with this one
    ├── CheckpointError     (also RuntimeError)     a checkpoint that cannot be written, or is not whole
    ├── JournalError        (also RuntimeError)     a journal that cannot be written, or is damaged
    ├── StaleGradientError  (also ValueError)       a gradient of parameters that are too old by now
    ├── QueueFullError      (also RuntimeError)     more gradients than the coordinator may keep
    ├── AccessError         (also PermissionError)  a caller that may not do what it asks for
    ├── LabError            (also RuntimeError)     a lab of network namespaces cannot be made, found or used
    └── MissingExtraError   (also ImportError)      an optional part is not installed
"""

__all__ = [
    "AccessError",
    "CheckpointError",
    "ConfigError",
    "GradwireError",
    "JournalError",
    "LabError",
    "MissingExtraError",
    "NonFiniteError",
    "PeerError",
    "QueueFullError",
    "StaleGradientError",
    "WireError",
]


class GradwireError(Exception):
    """Base of every error gradwire raises on purpose.

    >>> issubclass(WireError, GradwireError)
    True
    """


class ConfigError(GradwireError, ValueError):
    """A codec string, parameter or argument is not allowed; the message says what is.

    >>> import gradwire
    >>> gradwire.codec("topk:2")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `topk(density=...)` must be in (0, 1]; got 2.0.
    """


class WireError(GradwireError, ValueError):
    """Bytes that are not a valid payload: truncated, changed, oversized or of another version.

    >>> import gradwire
    >>> gradwire.decode(b"not a payload")
    Traceback (most recent call last):
    gradwire.errors.WireError: truncated: a payload has at least 48 bytes; got 13.
    """


class NonFiniteError(GradwireError, ArithmeticError):
    """A tensor holds NaN or Inf. Reported, never averaged in.

    >>> import gradwire, torch
    >>> gradwire.encode(torch.tensor([1.0, float("nan")]), "int8")
    Traceback (most recent call last):
    gradwire.errors.NonFiniteError: 1 of 2 values are NaN or Inf.
    """


class PeerError(GradwireError, RuntimeError):
    """Another rank died, or sent something this rank did not expect; the message names it.

    >>> issubclass(PeerError, RuntimeError)
    True
    """


class CheckpointError(GradwireError, RuntimeError):
    """A checkpoint cannot be written, or is incomplete or damaged; the message names the file.

    >>> issubclass(CheckpointError, RuntimeError)
    True
    """


class JournalError(GradwireError, RuntimeError):
    """A journal cannot be written, or is damaged; the message says where, and what to do.

    >>> issubclass(JournalError, RuntimeError)
    True
    """


class StaleGradientError(GradwireError, ValueError):
    """A gradient was computed with parameters that are too many versions old; ``current`` is the present version.

    >>> StaleGradientError(3, 9, 4).current
    9
    """

    def __init__(self, version: int, current: int, bound: int) -> None:
        super().__init__(
            f"the gradient is of version {version}, {current - version} behind the present one, {current}; at most "
            f"{bound} is allowed. Read the parameters again."
        )
        self.version, self.current, self.bound = version, current, bound


class QueueFullError(GradwireError, RuntimeError):
    """More gradients wait than may; add them again later.

    >>> issubclass(QueueFullError, RuntimeError)
    True
    """


class AccessError(GradwireError, PermissionError):
    """A caller is not known, or is ``known`` and may not do what it asks for; no secret is in the message.

    >>> issubclass(AccessError, PermissionError)
    True
    """

    def __init__(self, message: str, *, known: bool = False) -> None:
        super().__init__(message)
        self.known = known


class LabError(GradwireError, RuntimeError):
    """A lab cannot be made, found or used here; the message says why and what to do.

    >>> issubclass(LabError, RuntimeError)
    True
    """


class MissingExtraError(GradwireError, ImportError):
    """An optional part is not installed; the message has the command that installs it.

    >>> issubclass(MissingExtraError, ImportError)
    True
    """
