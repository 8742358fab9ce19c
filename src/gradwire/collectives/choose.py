"""Which collective a codec gets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from gradwire.codecs import Codec, codec
from gradwire.collectives.base import Collective
from gradwire.collectives.gather import Gather
from gradwire.collectives.hierarchical import Hierarchical
from gradwire.collectives.peers import Peers
from gradwire.collectives.two_stage import TwoStage
from gradwire.errors import ConfigError
from gradwire.transforms import ErrorFeedback, for_training, is_stateful
from gradwire.wire import TensorSpec

__all__ = [
    "AllReduce",
    "Method",
    "PowerSGD",
    "encoded_nbytes",
    "flat_collective",
    "is_elementwise",
    "method",
    "rows_and_columns",
]

_POWERSGD: Final = re.compile(r"(powersgd|acp):(\d+)(?:,start=(\d+))?(?:\+(.+))?")


def is_elementwise(what: Codec) -> bool:
    """Whether a codec takes tensors end to end as one: shapes do not matter to it, nor any state but a residual.

    >>> import gradwire
    >>> [is_elementwise(gradwire.codec(name)) for name in ("int4", "ef(topk:0.01)", "lowrank:4", "ef21(int4)")]
    [True, True, False, False]
    """
    inner = what.inner if isinstance(what, ErrorFeedback) else what
    square, flat = TensorSpec((256, 256)), TensorSpec((256 * 256,))
    return not is_stateful(inner) and inner.layout(square).body_nbytes == inner.layout(flat).body_nbytes


def flat_collective(peers: Peers, what: Codec, hosts: tuple[int, ...] = ()) -> Collective:
    """The collective for a flat tensor: for two ranks a direct exchange has the same bytes in one round.

    With ``hosts``, the host of each rank, what travels inside one is dense.
    """
    if len(set(hosts)) < len(hosts) and is_elementwise(what):
        return Hierarchical(peers, what, hosts)
    return Gather(peers, what) if peers.size <= 2 or not is_elementwise(what) else TwoStage(peers, what)


@dataclass(frozen=True)
class AllReduce:
    """Gradients as they are, by the process group's own all-reduce: ``dense``.

    >>> print(method("dense"))
    dense
    """

    def __str__(self) -> str:
        """The string that makes it."""
        return "dense"


@dataclass(frozen=True)
class PowerSGD:
    """How :class:`~gradwire.collectives.low_rank.LowRank` is to reduce: ``powersgd:RANK[,start=STEPS][+FACTORS]``.

    ``acp:`` instead of ``powersgd:`` sends one factor a step, in turn.

    >>> print(method("powersgd:16+int8"), method("acp:8,start=5+int8"), method("powersgd:4"))
    powersgd:16+int8 acp:8,start=5+int8 powersgd:4
    """

    rank: int
    factors: Codec
    start: int = 10
    alternate: bool = False

    def __str__(self) -> str:
        """The string that makes it."""
        factors = "" if str(self.factors) == "none" else f"+{self.factors}"
        start = f",start={self.start}" if self.start != 10 else ""
        return f"{'acp' if self.alternate else 'powersgd'}:{self.rank}{start}{factors}"

    def pays(self, rows: int, columns: int) -> bool:
        """Whether thin factors have at most half the elements of the matrix."""
        return 2 * min(self.rank, rows, columns) * (rows + columns) <= rows * columns


Method: TypeAlias = Codec | PowerSGD | AllReduce
"""How gradients travel."""


def method(what: str | Method, *, feedback: bool = True) -> Method:
    """What a string for training stands for; biased codecs get error feedback, unless told otherwise.

    >>> import gradwire
    >>> str(method("topk:0.01"))
    'ef(topk:0.01)'
    """
    if isinstance(what, PowerSGD | AllReduce):
        return what
    if what == "dense":
        return AllReduce()
    match = _POWERSGD.fullmatch(what) if isinstance(what, str) else None
    if match is None:
        if isinstance(what, str) and what.split(":")[0] in ("powersgd", "acp"):
            raise ConfigError(
                f"`codec` must be like 'powersgd:16', 'powersgd:16+int8', 'acp:8,start=20'; got {what!r}."
            )
        try:
            return for_training(what) if feedback else codec(what)
        except ConfigError as error:
            if not str(error).startswith("unknown codec"):
                raise
            raise ConfigError(f"{error} Or 'dense', 'powersgd:RANK' and 'acp:RANK'.") from None
    name, rank, start, factors = match.groups()
    if not 1 <= int(rank) <= 1024:
        raise ConfigError(f"the rank of '{name}' must be from 1 to 1024; got {rank}.")
    inner = codec(factors or "none")
    if is_stateful(inner) or not is_elementwise(inner):
        raise ConfigError(f"the factors of '{name}' must travel in a codec without state; got '{inner}'.")
    return PowerSGD(int(rank), inner, int(start or 10), name == "acp")


def encoded_nbytes(how: Method, shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the bytes that tensors have as a rank encodes them, at most; those of a first step may be more.

    >>> [encoded_nbytes(method(each), [(64, 64), (64, 64)]) for each in ("dense", "int4", "powersgd:4+int8")]
    [32768, 4304, 1112]
    """
    if isinstance(how, AllReduce):
        return 4 * sum(map(math.prod, shapes))
    if isinstance(how, PowerSGD):
        sides = sum(min(how.rank, rows, columns) * (rows + columns) for rows, columns in map(rows_and_columns, shapes))
        return how.factors.layout(TensorSpec((sides // 2 if how.alternate else sides,))).nbytes
    if is_elementwise(how):
        shapes = [(sum(map(math.prod, shapes)),)]
    return sum(how.layout(TensorSpec(shape)).nbytes for shape in shapes)


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Return the matrix that low rank makes of a tensor.

    >>> rows_and_columns((16, 3, 3))
    (16, 9)
    """
    return shape[0], math.prod(shape) // shape[0]
