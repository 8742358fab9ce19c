"""What a codec is.

A codec turns a tensor into a few flat parts and back. It is a frozen dataclass: its fields are its parameters, it
holds no tensors and never communicates. A subclass writes ``_parts``, ``_encode`` and ``_decode`` on flat float32
tensors; shapes, dtypes, non-finite values, checks and the payload are handled here.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import typing
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, TypeAlias, cast

import torch
from torch import Tensor

from gradwire.errors import ConfigError, WireError
from gradwire.kernels import ops
from gradwire.kernels.memory import copy_of
from gradwire.wire import Key, Payload, TensorSpec, header_nbytes

__all__ = ["DEFAULT_KEY", "EMPTY", "Carrier", "Codec", "Laws", "Layout", "Part", "State"]

State: TypeAlias = Mapping[str, Tensor | int]
EMPTY: Final[State] = MappingProxyType({})
DEFAULT_KEY: Final = Key()
_MOST_PLANS: Final = 1024


@dataclass(frozen=True)
class Part:
    """One flat array of a payload.

    >>> Part("codes", torch.uint8, 1000).nbytes
    1000
    """

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """The parts of a payload and what they weigh, known from the spec alone.

    ``nbytes`` is the length of the whole frame, header included: what ``gradwire.encode`` returns. If ``exact`` is
    false it is an upper bound.

    >>> import gradwire
    >>> layout = gradwire.codec("int4").layout(gradwire.TensorSpec((1000,)))
    >>> layout.header_nbytes, layout.body_nbytes, layout.nbytes
    (80, 516, 596)
    """

    parts: tuple[Part, ...]
    header_nbytes: int
    exact: bool = True

    @property
    def body_nbytes(self) -> int:
        """Bytes of the parts, scales and indices included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes that travel."""
        return self.header_nbytes + self.body_nbytes


@dataclass(frozen=True)
class Laws:
    """What a codec promises of x̂ = decode(encode(x)); the conformance suite holds it to this.

    ``unbiased``: E[x̂] = x. ``contraction`` is a delta with E‖x - x̂‖² <= (1 - delta) ‖x‖², None if there is none.
    ``variance`` is an omega with E‖x - x̂‖² <= omega ‖x‖². ``keeps_zeros``: each 0 decodes to 0 (a tensor of zeros
    always does). ``random``: the bytes depend on the key. ``exact_bytes``: they are the same on every machine and
    backend, which matrix products cannot promise.

    Expectations are over keys; the inequalities are for any x, up to an absolute error of 1e-30 an element.

    >>> import gradwire
    >>> gradwire.codec("topk:0.25").laws(gradwire.TensorSpec((1000,))).contraction
    0.25
    """

    unbiased: bool = False
    contraction: float | None = 0.0
    variance: float | None = None
    keeps_zeros: bool = True
    random: bool = False
    exact_bytes: bool = True


@dataclass(frozen=True)
class Codec(ABC):
    """A gradient becomes a payload, and a payload a gradient.

    >>> import gradwire
    >>> codec = gradwire.codec("int4:block=64")
    >>> payload, state = codec.encode(torch.linspace(-1, 1, 5))
    >>> codec.decode(payload)
    tensor([-0.9980, -0.5703,  0.0000,  0.5703,  0.9980])
    """

    id: ClassVar[str]

    # Identity: the fields are everything.

    def __post_init__(self) -> None:
        """Check the types of the fields; a subclass checks their ranges after calling this."""
        for field, kind in fields_of(type(self)).values():
            value = getattr(self, field.name)
            if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
                self._require(field.name, abs(value) <= sys.float_info.max, "a finite number")
                object.__setattr__(self, field.name, float(value))
            elif kind is float:
                self._require(field.name, False, "a number")
            elif kind is int:
                self._require(field.name, isinstance(value, int) and not isinstance(value, bool), "a whole number")
            elif isinstance(kind, type):
                self._require(field.name, isinstance(value, kind), f"of type {kind.__name__}")

    def _require(self, name: str, condition: bool, allowed: str) -> None:
        if not condition:
            raise ConfigError(f"`{self.id}({name}=...)` must be {allowed}; got {getattr(self, name)!r}.")

    def _require_block(self, block: int) -> None:
        power_of_two = 16 <= block <= 65536 and block & (block - 1) == 0
        self._require("block", power_of_two, "a power of two from 16 to 65536")

    def __str__(self) -> str:
        """The string that makes this codec: ``gradwire.codec(str(c)) == c``."""
        return self._string

    @functools.cached_property
    def _string(self) -> str:
        positional, keyword, inner = [], [], ""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Codec):
                inner = f"({value})"
            elif not field.kw_only:
                positional.append(_text(value))
            elif value != field.default:
                keyword.append(f"{field.name}={_text(value)}")
        params = ",".join(positional + keyword)
        return f"{self.id}:{params}{inner}" if params else f"{self.id}{inner}"

    def config(self) -> dict[str, Any]:
        """The codec as plain JSON types; ``gradwire.codec`` takes it back."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"codec": self.id} | {k: v.config() if isinstance(v, Codec) else v for k, v in values.items()}

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Instances the conformance suite and the benchmarks use; a codec with parameters lists telling ones."""
        return (cls(),)

    # What it promises.

    @abstractmethod
    def laws(self, spec: TensorSpec) -> Laws:
        """What holds of every encode of such a tensor."""

    @abstractmethod
    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """Largest |x - x̂| of each element of ``x``, the flat, finite float32 values of a tensor of that spec."""

    @property
    def wants_feedback(self) -> bool:
        """Whether training should add error feedback unless told otherwise: yes for biased codecs."""
        return not self.laws(TensorSpec((1 << 20,))).unbiased

    def contractive(self) -> Codec:
        """A variant with a contraction, which error feedback needs; most codecs have one as they are."""
        return self

    # What a subclass writes: flat float32 tensors in, flat float32 tensors out.

    @abstractmethod
    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        """Parts of a payload, with their exact or largest sizes."""

    @abstractmethod
    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        """The parts' contents, in the order of ``_parts``. ``x`` is flat, contiguous, float32 and finite."""

    @abstractmethod
    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        """Flat float32 values. The parts have the dtypes and sizes of ``_parts``."""

    _exact: ClassVar[bool] = True  # whether the sizes of `_parts` are exact

    # What a subclass may write as well, to save passes over the tensor.

    def _encode_with(
        self, x: Tensor, residual: Tensor | None, decay: float, spec: TensorSpec, key: Key
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        """Parts of e = x + decay * residual, how many of its elements are not finite, and what decoding loses of e.

        ``x`` may hold NaN and Inf; they are encoded as 0. Without a residual there is no loss to return.
        """
        e, nonfinite = ops.accumulate(x, residual, decay)
        parts = self._encode(e, spec, key)
        return parts, nonfinite, None if residual is None else e - self._decode(parts, spec, key)

    def _sum_into(self, payloads: Sequence[Payload], out: Tensor, *, add: bool) -> None:
        """Write to flat ``out`` the sum of payloads, in their order, with ``add`` on top of what is there."""
        for payload in payloads:
            values = self._values(payload)
            out.add_(values) if add else out.copy_(values)
            add = True

    # What a user calls.

    def layout(self, spec: TensorSpec) -> Layout:
        """Parts and sizes of the payload of a tensor, from its spec alone.

        >>> import gradwire
        >>> [(p.name, p.nbytes) for p in gradwire.codec("int8").layout(TensorSpec((1000,))).parts]
        [('scales', 8), ('codes', 1000)]
        """
        if not isinstance(spec, TensorSpec):
            raise ConfigError(f"`spec` must be a TensorSpec; got {type(spec).__name__}.")
        parts, order = self._plan(spec)
        header = header_nbytes(str(self), len(spec.shape), len(parts))
        return Layout(tuple(parts[i] for i in order), header, self._exact)

    def _plan(self, spec: TensorSpec) -> tuple[tuple[Part, ...], list[int]]:
        """Parts, and their order on the wire. Remembered: a training asks for the same few specs every step."""
        plan = self._plans.get(spec)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            parts = self._parts(spec)
            plan = self._plans[spec] = parts, _wire_order(parts)
        return plan

    @functools.cached_property
    def _plans(self) -> dict[TensorSpec, tuple[tuple[Part, ...], list[int]]]:
        return {}

    def init(self, spec: TensorSpec, device: torch.device | str | None = None) -> State:
        """State before the first step: tensors and integers by name. Most codecs have none.

        Without a device, on torch's default one.
        """
        return EMPTY

    def encode(self, x: Tensor, state: State = EMPTY, key: Key = DEFAULT_KEY) -> tuple[Payload, State]:
        """Encode a tensor; the state comes in and goes out, nothing is changed in place.

        NaN and Inf do not raise here, because ranks must agree on what to do: they are encoded as 0,
        ``payload.nonfinite`` counts them, and every decode of the payload raises ``NonFiniteError``.
        """
        spec = TensorSpec.of(x)  # first: it says what is wrong with a tensor
        if not isinstance(state, Mapping):
            raise ConfigError(f"`state` must be a mapping, from `codec.init(spec)`; got {type(state).__name__}.")
        return self._payload(_flat(x), spec, key)[0], state

    def decode(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """The tensor of a payload, in its own shape and dtype, or written into ``out``."""
        spec = self._checked(payload).spec
        if out is None:
            values = saturating(self._values(payload), spec.dtype).view(spec.shape)
            return values.clone() if _shares_memory(values, payload.parts) else values
        _check_target("out", out, spec)
        if _is_plain(out):
            self._sum_into([payload], out.view(-1), add=False)
            return out
        return out.copy_(saturating(self._values(payload), out.dtype).view(out.shape))

    def decode_add(self, payload: Payload | Sequence[Payload], acc: Tensor) -> None:
        """Add the tensor of a payload, or of several in their order, to ``acc`` in place.

        Several at once cost one pass over ``acc``.
        """
        several = isinstance(payload, list | tuple)
        payloads = cast(Sequence[Payload], payload if several else [payload])
        for each in payloads:
            _check_target("acc", acc, self._checked(each).spec)
        if not payloads:
            return
        if _is_plain(acc):
            self._sum_into(payloads, acc.view(-1), add=True)
            return
        for each in payloads:
            acc.add_(self._values(each).view(acc.shape))

    def encode_feedback(
        self, x: Tensor, residual: Tensor, spec: TensorSpec, key: Key, decay: float = 1.0
    ) -> tuple[Payload, Tensor]:
        """Encode e = x + decay * residual as a tensor of that spec; return the payload and e - x̂.

        If e is not finite the residual comes back as it was.
        """
        payload, rest = self._payload(_flat(x), spec, key, _flat(residual), decay)
        assert rest is not None
        return payload, rest.view(spec.shape)

    def sends(self, step: int) -> Codec:
        """The codec its payloads name at a step: itself, unless it is a transform of what another one sends."""
        return self

    def finish(self, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """What the mean of all ranks' decoded payloads stands for; most codecs: the mean itself."""
        return mean, state

    # Between a payload and flat float32 values.

    def _payload(
        self, flat: Tensor, spec: TensorSpec, key: Key, residual: Tensor | None = None, decay: float = 1.0
    ) -> tuple[Payload, Tensor | None]:
        """Encode the values of a tensor of that spec, with the residual if there is one; and the next residual."""
        if not isinstance(key, Key):
            raise ConfigError(f"`key` must be a gradwire.Key; got {type(key).__name__}.")
        parts, nonfinite, rest = self._encode_with(flat, residual, decay, spec, key)
        order = self._plan(spec)[1]
        owned = [copy_of(part) if _shares_memory(part, (flat,)) else part.contiguous() for part in parts]
        payload = Payload(str(self), spec, key, tuple(owned[i] for i in order), nonfinite)
        if residual is None or rest is None:
            return payload, None
        return payload, ops.keep_residual(rest, residual, nonfinite)

    def _values(self, payload: Payload) -> Tensor:
        """Decode the values of a payload, after making sure that it is this codec's."""
        return self._decode(self._checked_parts(self._checked(payload)), payload.spec, payload.key)

    def _checked(self, payload: Payload) -> Payload:
        if not isinstance(payload, Payload):
            raise ConfigError(
                f"`payload` must be a Payload; got {type(payload).__name__}. Bytes: gradwire.decode or wire.unpack."
            )
        payload.check_finite()
        return payload

    def _checked_parts(self, payload: Payload) -> tuple[Tensor, ...]:
        """Parts of a payload in the order of ``_parts``."""
        if payload.codec != str(self):
            raise ConfigError(f"`payload` was encoded with {payload.codec!r}; this codec is '{self}'.")
        expected, order = self._plan(payload.spec)
        if len(payload.parts) != len(expected):
            raise WireError(f"{self} has {len(expected)} parts; the payload has {len(payload.parts)}.")
        parts = dict(zip(order, payload.parts, strict=True))
        for position, part in parts.items():
            want = expected[position]
            size_fits = part.numel() == want.numel or (not self._exact and part.numel() <= want.numel)
            if part.dtype != want.dtype or not size_fits:
                raise WireError(
                    f"part {want.name!r} of {self} for shape {payload.spec.shape} must have "
                    f"{'' if self._exact else 'at most '}{want.numel} items of {want.dtype}; "
                    f"got {part.numel()} of {part.dtype}."
                )
        return tuple(parts[position] for position in range(len(expected)))


@dataclass(frozen=True)
class Carrier(Codec):
    """A codec that keeps fewer values than the tensor has, and the structure to put them back.

    Its values travel as they are, or through another codec: ``"topk:0.01+int8"`` (:class:`gradwire.transforms.Chain`).
    """

    @abstractmethod
    def _count(self, spec: TensorSpec) -> int:
        """How many values are kept, or the most that may be."""

    @abstractmethod
    def _structure(self, spec: TensorSpec) -> tuple[Part, ...]:
        """The parts beside the values."""

    @abstractmethod
    def _split(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        """Kept values (flat float32), the contents of ``_structure``, and what ``_leave`` is told of their places."""

    @abstractmethod
    def _join(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        """The flat tensor of values and structure."""

    @abstractmethod
    def _leave(
        self, e: Tensor, values: Tensor, sent: Tensor, places: Tensor | None, spec: TensorSpec, key: Key
    ) -> Tensor:
        """What is left of e if of ``values`` only ``sent`` travelled; e may be overwritten."""

    def _actual_count(self, structure: tuple[Tensor, ...], spec: TensorSpec) -> int:
        """How many values this payload has; a codec whose count varies reads it from its structure."""
        return self._count(spec)

    def _values_dtype(self, spec: TensorSpec) -> torch.dtype:
        return spec.dtype

    def _propagate(
        self, errors: Tensor, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key
    ) -> Tensor:
        """What errors of at most ``errors`` in the values do to the tensor, at most."""
        return self._join(errors, structure, spec, key)

    def _parts(self, spec: TensorSpec) -> tuple[Part, ...]:
        return (Part("values", self._values_dtype(spec), self._count(spec)), *self._structure(spec))

    def _encode(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, ...]:
        values, structure, _ = self._split(x, spec, key)
        return (saturating(values, self._values_dtype(spec)), *structure)

    def _encode_with(
        self, x: Tensor, residual: Tensor | None, decay: float, spec: TensorSpec, key: Key
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
        e, nonfinite = ops.accumulate(x, residual, decay)
        values, structure, places = self._split(e, spec, key)
        sent = saturating(values, self._values_dtype(spec))
        rest = None if residual is None else self._leave(e, values, sent.to(torch.float32), places, spec, key)
        return (sent, *structure), nonfinite, rest

    def _decode(self, parts: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        values, structure = self._checked_values(parts, spec)
        return self._join(values.to(torch.float32), structure, spec, key)

    def _checked_values(self, parts: tuple[Tensor, ...], spec: TensorSpec) -> tuple[Tensor, tuple[Tensor, ...]]:
        values, structure = parts[0], parts[1:]
        count = self._actual_count(structure, spec)
        if values.numel() != count:
            raise WireError(f"{self} declares {count} values; the payload has {values.numel()}.")
        return values, structure


@functools.cache
def fields_of(cls: type[Codec]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """A codec's parameters: name -> (field, type)."""
    hints = typing.get_type_hints(cls)
    return {field.name: (field, hints[field.name]) for field in dataclasses.fields(cls)}


def _flat(x: Tensor) -> Tensor:
    return x.detach().reshape(-1).to(torch.float32).resolve_neg().contiguous()


def _is_plain(x: Tensor) -> bool:
    """Whether kernels can write to it as it is."""
    return x.dtype == torch.float32 and x.is_contiguous() and not x.requires_grad


def _shares_memory(x: Tensor, others: Iterable[Tensor]) -> bool:
    storage = x.untyped_storage().data_ptr()
    return x.numel() > 0 and any(storage == other.untyped_storage().data_ptr() for other in others)


def _check_target(name: str, target: Tensor, spec: TensorSpec) -> None:
    if not isinstance(target, Tensor):
        raise ConfigError(f"`{name}` must be a tensor; got {type(target).__name__}.")
    if target.requires_grad or target.device.type == "meta":
        raise ConfigError(f"`{name}` must be a tensor with values that requires no gradient: pass `{name}.detach()`.")
    if tuple(target.shape) != spec.shape or not target.is_floating_point():
        raise ConfigError(
            f"`{name}` must be a floating point tensor of shape {spec.shape}; "
            f"got {target.dtype} of shape {tuple(target.shape)}."
        )


def saturating(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 values as another float dtype, large ones at its largest instead of Inf."""
    limit = torch.finfo(dtype).max
    if dtype.itemsize >= 4:
        return values.to(dtype)
    return values.clamp(-limit, limit).to(dtype)


def _wire_order(parts: tuple[Part, ...]) -> list[int]:
    """Positions of the parts in the order they travel: falling item size, so that each is aligned."""
    return sorted(range(len(parts)), key=lambda i: -parts[i].dtype.itemsize)


def _text(value: object) -> str:
    # '+' joins codecs in a string, so 1e+20 is written 1e20.
    return str(value).lower() if isinstance(value, bool) else str(value).replace("e+", "e")
