"""``lowrank:r``: a matrix as the product of two thin ones. One-shot and local; PowerSGD is a collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.base import Carrier, Codec, Laws, Part
from gradwire.codecs.registry import register
from gradwire.kernels import ops
from gradwire.kernels.law import STREAM_SKETCH
from gradwire.wire import Key, TensorSpec


@register
@dataclass(frozen=True)
class LowRank(Carrier):
    """Project a matrix onto ``rank`` directions found by a random sketch: M ≈ P Qᵀ, P orthonormal, Q = Mᵀ P.

    A tensor of more than two dimensions is a matrix of its first against the rest. Vectors, and matrices too small
    to gain, travel whole. Values beyond 3.4e38 / (4 rows) are cut there. The factors may travel quantized:
    ``lowrank:16+int8``.

    >>> import gradwire
    >>> x = torch.outer(torch.arange(8.0), torch.ones(32))
    >>> torch.allclose(gradwire.decode(gradwire.encode(x, "lowrank:1")), x, atol=1e-5)
    True
    """

    id: ClassVar[str] = "lowrank"
    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require("rank", 1 <= self.rank <= 65536, "from 1 to 65536")

    @classmethod
    def examples(cls) -> tuple[Codec, ...]:
        """Thin and less thin."""
        return cls(1), cls(4)

    def _matrix(self, spec: TensorSpec) -> tuple[int, int, int]:
        """Rows, columns and rank used; rank 0 means the tensor travels whole."""
        rows = spec.shape[0] if len(spec.shape) > 1 else 1
        columns = spec.numel // max(1, rows)
        rank = min(self.rank, rows, columns)
        return rows, columns, rank if 4 * rank * (rows + columns) < spec.nbytes else 0

    def laws(self, spec: TensorSpec) -> Laws:
        """A projection: never expands. Matrix products differ in the last bits between machines."""
        whole = self._matrix(spec)[2] == 0
        return Laws(contraction=1.0) if whole else Laws(keeps_zeros=False, random=True, exact_bytes=False)

    def bound(self, x: Tensor, spec: TensorSpec, key: Key) -> Tensor:
        """A projection moves a column by its own norm at most."""
        rows, columns, rank = self._matrix(spec)
        if rank == 0:
            return torch.zeros_like(x)
        norms: Tensor = x.view(rows, columns).double().norm(dim=0) * (1 + 1e-4)
        excess = (x.double().abs() - _limit(rows)).clamp(min=0)
        return norms.expand(rows, columns).reshape(-1) + excess

    def _propagate(
        self, errors: Tensor, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key
    ) -> Tensor:
        rows, columns, rank = self._matrix(spec)
        if rank == 0:
            return errors
        p, q = _factors(values.abs(), rows, columns, rank)
        dp, dq = _factors(errors, rows, columns, rank)
        return (dp.T @ q + p.T @ dq + dp.T @ dq).reshape(-1)

    def _values_dtype(self, spec: TensorSpec) -> torch.dtype:
        return torch.float32 if self._matrix(spec)[2] else spec.dtype

    def _count(self, spec: TensorSpec) -> int:
        rows, columns, rank = self._matrix(spec)
        return rank * (rows + columns) if rank else spec.numel

    def _structure(self, spec: TensorSpec) -> tuple[Part, ...]:
        return ()

    def _split(self, x: Tensor, spec: TensorSpec, key: Key) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:
        rows, columns, rank = self._matrix(spec)
        if rank == 0:
            return x, (), None
        matrix = x.view(rows, columns).clamp(-_limit(rows), _limit(rows))
        draws = ops.random_bits(key, STREAM_SKETCH, columns * rank, device=x.device)
        sketch = (draws.to(torch.float32) * 2.0**-31 - 1.0).view(columns, rank)
        # Scaled to 1 first: a product of huge values would overflow, one of tiny values vanish.
        largest = matrix.abs().max()
        unit = matrix / torch.where(largest > 0, largest, 1.0)
        (sketched,) = ops.thin_products([unit], [sketch])
        (sharpened,) = ops.thin_products([unit], ops.thin_transposed_products([unit], [sketched]))  # a power iteration
        p, _ = torch.linalg.qr(sharpened)
        p = torch.where(largest > 0, p, 0.0)  # the factors of zeros are zeros, also after a lossy codec
        q = ops.thin_transposed_products([unit], [p])[0].T * largest
        # Factor by factor, so that a block of a quantizer sees values of one magnitude.
        return torch.cat([p.T.reshape(-1), q.reshape(-1)]), (), None

    def _leave(
        self, e: Tensor, values: Tensor, sent: Tensor, places: Tensor | None, spec: TensorSpec, key: Key
    ) -> Tensor:
        rows, columns, rank = self._matrix(spec)
        if rank == 0:
            return e - sent
        p, q = _factors(sent, rows, columns, rank)
        return ops.outer_residual([e.view(rows, columns)], [p.T], [q.T])[0].view(-1)

    def _join(self, values: Tensor, structure: tuple[Tensor, ...], spec: TensorSpec, key: Key) -> Tensor:
        rows, columns, rank = self._matrix(spec)
        if rank == 0:
            return values
        p, q = _factors(values, rows, columns, rank)
        return (p.T @ q).reshape(-1)


def _limit(rows: int) -> float:
    """Larger values are cut: no entry of a factor, and no sum of their products, may leave float32."""
    return torch.finfo(torch.float32).max / (4 * rows)


def _factors(values: Tensor, rows: int, columns: int, rank: int) -> tuple[Tensor, Tensor]:
    """Views of the two factors, each rank x its length."""
    p, q = torch.split(values, [rank * rows, rank * columns])
    return p.view(rank, rows), q.view(rank, columns)
