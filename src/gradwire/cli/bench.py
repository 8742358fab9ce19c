"""``gradwire bench``: what codecs weigh, and how fast they are here."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import track
from torch import Tensor

from gradwire import kernels
from gradwire.cli.output import JsonOption, errors, print_json, show, table
from gradwire.codecs import Codec, codec, registered
from gradwire.codecs.sparse import Sparse, index_nbytes
from gradwire.errors import ConfigError
from gradwire.transforms import Chain, Rotate
from gradwire.transforms.base import SenderTransform
from gradwire.wire import TensorSpec

__all__ = ["bench"]

bench = typer.Typer(help="Measure: what codecs weigh, and how fast they are here.", no_args_is_help=True)

_MOST_ELEMENTS: Final = 100_000_000
_CHAINS: Final = ("topk:0.001", "topk:0.01+int8", "topk:0.01+int4", "blocktopk:0.01+int4", "randomk:0.1+int4")
_CHAINS_SIZED: Final = (*_CHAINS, "threshold:1+int8", "lowrank:16", "lowrank:16+int8", "rotate(int4)", "rotate(int3)")
_CHAINS_TIMED: Final = (*_CHAINS, "ef(int4)", "ef(topk:0.01)", "rotate(int4)")


@bench.callback()
def _group() -> None:
    pass


@bench.command("codecs")
def codecs(
    sizes: Annotated[bool, typer.Option("--bytes", help="Sizes instead of speed.")] = False,
    elements: Annotated[
        int, typer.Option(help="Elements of the tensor; a square matrix of about as many is used.")
    ] = 1_000_000,
    only: Annotated[
        list[str] | None, typer.Option("--codec", help="Only this codec; may be given several times.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Timed rounds over all codecs; the median counts.")] = 5,
    as_json: JsonOption = False,
) -> None:
    """Every codec on one tensor: bits an element with all metadata, or speed against a copy."""
    if not 1 <= elements <= _MOST_ELEMENTS:
        raise ConfigError(f"`--elements` must be from 1 to {_MOST_ELEMENTS}; got {elements}.")
    if not 1 <= repeats <= 1000:
        raise ConfigError(f"`--repeats` must be from 1 to 1000; got {repeats}.")
    chosen = [codec(name) for name in only] if only else None
    if sizes:
        _bytes(chosen or _plain_codecs() + [codec(name) for name in _CHAINS_SIZED], _square(elements), as_json)
    else:
        _speed(chosen or _plain_codecs() + [codec(name) for name in _CHAINS_TIMED], _square(elements), repeats, as_json)


def _square(elements: int) -> TensorSpec:
    side = math.isqrt(elements)
    return TensorSpec((side, side))


def _plain_codecs() -> list[Codec]:
    """The default, or first example, of every codec that is no transform; both forms of fp8."""
    firsts = [cls.examples()[0] for cls in registered().values()]
    plain = [c for c in firsts if not isinstance(c, SenderTransform | Chain | Rotate)]
    return [*plain, codec("fp8:e5m2"), codec("topk:0.1")]


def _bytes(codecs: list[Codec], spec: TensorSpec, as_json: bool) -> None:
    x = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
    rows = [
        _weigh(c, x)
        for c in track(codecs, description="encoding", console=errors, transient=True, disable=not errors.is_terminal)
    ]
    rows.sort(key=lambda row: -row["bits_per_element"])
    if as_json:
        print_json({"shape": list(spec.shape), "codecs": rows})
        return
    columns = {"codec": "left", "bits/elem": "right", "of fp32": "right"}
    columns |= {"bits/idx": "right", "/entropy": "right", "error": "right"}
    cells = [
        (
            row["codec"],
            f"{row['bits_per_element']:.4f}" + ("" if row["exact"] else "*"),
            f"{row['ratio']:.4f}",
            _number(row["index_bits_per_value"], ".3f"),
            _number(row["index_over_entropy"], ".3f"),
            f"{row['relative_squared_error']:.2e}",
        )
        for row in rows
    ]
    caption = (
        "Whole frames: header, scales and indices included. bits/idx: of a kept value's index, and over log2 C(n, k). "
        "error: relative squared error of one encode of a Gaussian. * varies with the tensor."
    )
    show(table(f"bytes of a {spec.shape[0]} x {spec.shape[1]} float32 tensor", columns, cells, caption))


def _weigh(c: Codec, x: Tensor) -> dict[str, Any]:
    payload, _ = c.encode(x, c.init(TensorSpec.of(x)))
    error = float((c.decode(payload) - x).double().square().sum() / x.double().square().sum())
    index_bits, over_entropy = _index_cost(c, payload.spec, int((c.decode(payload) != 0).sum()))
    return {
        "codec": str(c),
        "bits_per_element": 8 * payload.nbytes / x.numel(),
        "ratio": payload.nbytes / (4 * x.numel()),
        "exact": c.layout(payload.spec).exact,
        "header_bytes": payload.nbytes - payload.body_nbytes,
        "index_bits_per_value": index_bits,
        "index_over_entropy": over_entropy,
        "relative_squared_error": error,
    }


def _index_cost(c: Codec, spec: TensorSpec, kept: int) -> tuple[float | None, float | None]:
    """Bits an index takes, and over the log2 C(n, k) bits no code of arbitrary index sets can go below."""
    c = c.inner if isinstance(c, SenderTransform) else c
    carrier = c.carrier if isinstance(c, Chain) else c
    if not isinstance(carrier, Sparse):
        return None, None
    n, k = spec.numel, carrier._count(spec) if carrier._exact else kept
    bits = 8 * index_nbytes(n, k)
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    return (bits / k, bits / entropy) if 0 < k < n else (None, None)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _speed(codecs: list[Codec], spec: TensorSpec, repeats: int, as_json: bool) -> None:
    x = torch.randn(spec.shape, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(x)
    work: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(x)}
    for c in codecs:
        state = c.init(spec)
        payload, state = c.encode(x, state)
        work[f"encode {c}"] = lambda c=c, state=state: c.encode(x, state)  # type: ignore[misc]
        work[f"decode {c}"] = lambda c=c, payload=payload: c.decode(payload, target)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in work}
    # Round after round over everything: a disturbance of the machine hits all alike.
    for _ in track(
        range(repeats), description="timing", console=errors, transient=True, disable=not errors.is_terminal
    ):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    median = {name: statistics.median(samples) for name, samples in times.items()}
    gb = 4 * x.numel() / 1e9
    rows: list[dict[str, Any]] = [
        {
            "codec": str(c),
            "encode_gb_s": gb / median[f"encode {c}"],
            "decode_gb_s": gb / median[f"decode {c}"],
            "encode_over_copy": median[f"encode {c}"] / median["copy"],
            "decode_over_copy": median[f"decode {c}"] / median["copy"],
        }
        for c in codecs
    ]
    if as_json:
        about = {"threads": torch.get_num_threads(), "backends": kernels.available(), "copy_gb_s": gb / median["copy"]}
        print_json({"shape": list(spec.shape), **about, "codecs": rows})
        return
    rows.sort(key=lambda row: -row["encode_gb_s"])
    columns = {"codec": "left", "enc GB/s": "right", "dec GB/s": "right", "enc time": "right", "dec time": "right"}
    cells = [
        (
            str(row["codec"]),
            f"{row['encode_gb_s']:.3f}",
            f"{row['decode_gb_s']:.3f}",
            f"{row['encode_over_copy']:.1f} copies",
            f"{row['decode_over_copy']:.1f} copies",
        )
        for row in rows
    ]
    caption = (
        f"GB/s of float32 input, and time in units of copying it ({gb / median['copy']:.1f} GB/s). "
        f"Median of {repeats} interleaved rounds, {torch.get_num_threads()} threads, "
        f"kernels: {', '.join(sorted(set(kernels.available().values())))}."
    )
    show(table(f"speed on a {spec.shape[0]} x {spec.shape[1]} float32 tensor", columns, cells, caption))
