"""``gradwire bench``: what codecs weigh, and how fast they are here."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, track
from torch import Tensor

from gradwire import benchmarks
from gradwire.benchmarks import plot
from gradwire.benchmarks.codecs import GROUPS, Notify, Report, Result, Settings
from gradwire.cli import (
    bench_auto,
    bench_coordinator,
    bench_exchange,
    bench_plan,
    bench_rounds,
    bench_stragglers,
    bench_telemetry,
    bench_train,
)
from gradwire.cli.completion import complete_codec
from gradwire.cli.manual import EXIT_STATUS, Group, command, manual
from gradwire.cli.output import JsonOption, errors, print_json, show, table
from gradwire.codecs import Codec, codec, registered
from gradwire.codecs.sparse import Sparse, index_nbytes
from gradwire.errors import ConfigError
from gradwire.transforms import Chain, Rotate
from gradwire.transforms.base import SenderTransform
from gradwire.wire import TensorSpec

__all__ = ["bench"]

bench = typer.Typer(
    cls=Group,
    help=manual(
        """Measure what codecs weigh, how fast they are here, and what training gains.

        Everything is timed beside what people use today, all contenders in turns in one run. Those that take --rate
        make links of that rate for their ranks (a lab), which needs Linux and root. All have --json.

        Examples:

          $ gradwire bench codecs --bytes
          $ gradwire bench codecs --quick
          $ sudo gradwire bench train --rate 100mbit --method ddp --method int4
        """
    ),
    epilog=EXIT_STATUS,
    no_args_is_help=True,
)

_MOST_ELEMENTS: Final = 100_000_000
_CHAINS: Final = ("topk:0.001", "topk:0.01+int8", "topk:0.01+int4", "blocktopk:0.01+int4", "randomk:0.1+int4")
_CHAINS_SIZED: Final = (*_CHAINS, "threshold:1+int8", "lowrank:16", "lowrank:16+int8", "rotate(int4)", "rotate(int3)")
_QUICK_ELEMENTS: Final = 1 << 18
_QUICK_ROUNDS: Final = 3
_SPEED: Final = "Speed"


def codecs(
    sizes: Annotated[bool, typer.Option("--bytes", help="Sizes instead of speed.")] = False,
    elements: Annotated[
        int | None,
        typer.Option(
            help="Elements of the tensor: with --bytes as a square matrix, for speed down to whole blocks of 1024.",
            show_default="1,000,000 with --bytes; 25,000,000; on CUDA 134,217,728",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            help="Only this codec; may be given several times.",
            autocompletion=complete_codec,
            show_default="all",
        ),
    ] = None,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            help=f"Only this operation: {', '.join(GROUPS)}; several times.",
            rich_help_panel=_SPEED,
            show_default="all",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.", rich_help_panel=_SPEED)] = "cpu",
    threads: Annotated[
        list[int] | None,
        typer.Option(
            help="Threads on the CPU; several times: the scaling too.", rich_help_panel=_SPEED, show_default="1"
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(help="Timed rounds over everything.", rich_help_panel=_SPEED, show_default=f"{Settings.rounds}"),
    ] = None,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Without the peers under torch.compile.", rich_help_panel=_SPEED)
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Seconds instead of minutes: small, 3 rounds, nothing compiled.", rich_help_panel=_SPEED
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Also draw the times, at the first number of threads: .png, .svg or .pdf.",
            rich_help_panel=_SPEED,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Weigh every codec on one tensor, or time it beside its peers and a copy.

    Sizes, with --bytes: bits an element with all metadata, and the error of one encode.

    Speed: each operation of ours, then what a practitioner would use instead: plain torch, the same compiled, and
    torchao and bitsandbytes where they are installed. Minutes; seconds with --quick.

    Examples:

      $ gradwire bench codecs --bytes
      $ gradwire bench codecs --quick --codec int4 --op encode
      $ gradwire bench codecs --threads 1 --threads 2 --plot speed.png
    """
    if sizes:
        speed_only = {"--op": groups, "--threads": threads, "--rounds": rounds, "--plot": picture, "--quick": quick}
        speed_only |= {"--no-compile": no_compile, "--device": device != "cpu"}
        if given := [name for name, value in speed_only.items() if value]:
            raise ConfigError(f"`{given[0]}` is about speed; `--bytes` takes --elements, --codec and --json.")
        if elements is None:
            elements = 1_000_000
        if not 1 <= elements <= _MOST_ELEMENTS:
            raise ConfigError(f"`--elements` must be from 1 to {_MOST_ELEMENTS}; got {elements}.")
        chosen = [codec(name) for name in only] if only else _plain_codecs() + [codec(name) for name in _CHAINS_SIZED]
        _bytes(chosen, _square(elements), as_json)
        return
    settings = Settings(
        elements=_QUICK_ELEMENTS if quick and elements is None else elements,
        device=device,
        threads=tuple(threads or (1,)),
        codecs=tuple(only or ()),
        groups=tuple(groups or ()),
        rounds=rounds if rounds is not None else _QUICK_ROUNDS if quick else Settings.rounds,
        compile=not (no_compile or quick),
    )
    if picture is not None:
        plot.check(picture)  # before minutes of measuring
    busy = os.getloadavg()[0]
    if busy > (os.cpu_count() or 1) - max(settings.threads) + 0.5:
        errors.print(f"the machine is busy (load {busy:.1f} on {os.cpu_count()} CPUs): expect figures that swing")
    with _progress() as notify:
        report = benchmarks.run(settings, notify)
    if as_json:
        print_json(report.to_json())
    else:
        for count in settings.threads:
            _speed(report, count)
        if len(settings.threads) > 1:
            _scaling(report)
    if picture is not None:
        plot.draw(report, picture)


command(bench, "codecs")(codecs)
command(bench, "train")(bench_train.train)
command(bench, "auto")(bench_auto.auto)
command(bench, "rounds")(bench_rounds.rounds)
command(bench, "stragglers")(bench_stragglers.stragglers)
command(bench, "telemetry")(bench_telemetry.telemetry)
command(bench, "exchange")(bench_exchange.exchange)
command(bench, "plan")(bench_plan.plan)
command(bench, "drift")(bench_plan.drift)
command(bench, "coordinator")(bench_coordinator.coordinator)


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


@contextmanager
def _progress() -> Iterator[Notify]:
    """A bar for people; elsewhere one line before what takes longest."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task, said = bar.add_task("preparing", total=None), False

        def notify(what: str, done: int, total: int) -> None:
            nonlocal said
            if what == "compiling" and not said and not errors.is_terminal:
                errors.print("compiling the peers, once; --no-compile leaves them out")
                said = True
            bar.update(task, description=what, completed=done, total=total)

        yield notify


def _speed(report: Report, threads: int) -> None:
    settings, cuda = report.settings, report.settings.device == "cuda"
    columns = {"": "left", "GB/s": "right", "x copy": "right"} | ({"bandwidth": "right"} if cuda else {})
    columns |= {"eager": "right"} | ({"compiled": "right"} if settings.compile else {})
    columns |= {"best peer": "left", "faster": "right"}
    cells: list[tuple[str, ...]] = []
    results = [result for result in report.results if result.threads == threads]
    for group, title in GROUPS.items():
        members = [result for result in results if result.group == group]
        cells += [(title,) + ("",) * (len(columns) - 1)] if members else []
        cells += [_row(result, settings) for result in members]
    where = report.machine["device"] + ("" if cuda else f", {threads} thread{'s' if threads > 1 else ''}")
    show(table(f"{settings.numel:,} float32 on {where}", columns, cells, _caption(report, results)))


def _row(result: Result, settings: Settings) -> tuple[str, ...]:
    mark = "*" if result.limit == "read" else ""

    def times(contender: str | None = None) -> str:
        if contender in result.failed:
            return "fails"
        over = result.over_limit(contender)
        return "" if over is None else f"{over:.2f}{mark}"

    share = (f"{result.bandwidth_share:.0%}",) if settings.device == "cuda" else ()
    in_torch = (times("eager"), times("compiled")) if settings.compile else (times("eager"),)
    faster = "" if result.speedup is None else f"{result.speedup:.2f}x" + ("~" if result.swings else "")
    return (f"  {result.name}", f"{result.gb_s:.2f}", times(), *share, *in_torch, result.best_peer or "", faster)


def _caption(report: Report, results: list[Result]) -> str:
    settings, versions = report.settings, report.machine["libraries"]
    copy_gb_s = results[0].nbytes / results[0].copy.median_s / 1e9
    parts = ["GB/s: float32 in or out over our time."]
    peers = "eager, compiled" if settings.compile else "eager"
    parts.append(
        f"x copy, {peers}: time of ours and of the peer over that of copying the input ({copy_gb_s:.1f} GB/s)."
    )
    if any(result.limit == "read" for result in results):
        parts.append("*: over that of reading it.")
    if settings.device == "cuda":
        parts.append("bandwidth: bytes that must move over our time, as a share of the copy's.")
    parts.append("faster: time of the best peer over ours; empty: no peer.")
    if any(result.swings for result in results):
        parts.append("~: the middle half of the rounds spreads over a quarter of the median or more.")
    if 4 * settings.numel < 32e6 and settings.device == "cpu":
        parts.append("So small a tensor stays in the cache: these are no figures for gradients.")
    parts.append(f"Median of {settings.rounds} interleaved rounds; kernels: {', '.join(report.machine['kernels'])};")
    others = ", ".join(f"{name} {version}" for name, version in versions.items())
    parts.append(f"torch {report.machine['torch']}; {others or 'torchao and bitsandbytes are not installed'}.")
    cache = report.machine.get("l2_bytes", 0)
    if 4 * settings.numel < 4 * cache:
        parts.append(f"The tensor is not much larger than the cache ({cache / 1e6:.0f} MB): take more --elements.")
    parts += [f"{r.group} {r.name}, {peer} fails: {why}" for r in results for peer, why in r.failed.items()]
    return " ".join(parts)


def _scaling(report: Report) -> None:
    first, *others = report.settings.threads
    columns = {"": "left", f"GB/s, {first}": "right"}
    for count in others:
        columns |= {f"GB/s, {count}": "right", f"{first} to {count}": "right", f"copy {first} to {count}": "right"}
    by_op = {(result.group, result.name, result.threads): result for result in report.results}
    cells = []
    for result in (result for result in report.results if result.threads == first):
        row = [f"{GROUPS[result.group]}: {result.name}", f"{result.gb_s:.2f}"]
        for count in others:
            scaled = by_op[result.group, result.name, count]
            ratio = result.ours.median_s / scaled.ours.median_s
            row += [f"{scaled.gb_s:.2f}", f"{ratio:.2f}x", f"{result.limit_s / scaled.limit_s:.2f}x"]
        cells.append(row)
    caption = "GB/s at each number of threads; how many times faster ours is with more, and the copy (or the read)."
    show(table(f"threads, on {report.machine['device']}", columns, cells, caption))
