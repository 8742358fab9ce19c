"""``gradwire plan``: how gradients would travel, without training."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import Tensor, nn

from gradwire.benchmarks.plan_plot import draw_scaling
from gradwire.benchmarks.plot import check as check_picture
from gradwire.benchmarks.training import BATCH_SIZES
from gradwire.cli.completion import complete_codec, complete_model
from gradwire.cli.output import JsonOption, console, errors, print_json, show, size, table
from gradwire.errors import ConfigError
from gradwire.lab import parse_rate
from gradwire.planner import CANDIDATES, Auto, Plan
from gradwire.planner.simulate import (
    Workload,
    describe_workload,
    network_of,
    plan_on_paper,
    profile_workload,
    trials_among,
    try_on_workload,
)
from gradwire.tasks import TASKS

__all__ = ["plan", "plan_table"]

_MOST_HOSTS = 100_000
_LONGEST_MS = 1e7


def plan(
    model: Annotated[
        str,
        typer.Option(
            help=f"{' or '.join(TASKS)}, or package.module:function that returns a torch.nn.Module.",
            autocompletion=complete_model,
        ),
    ] = "digits",
    rate: Annotated[
        str, typer.Option(help="Speed of every host's link: 100mbit, 10gbit, ...; none: it is not the limit.")
    ] = "1gbit",
    hosts: Annotated[int, typer.Option("--hosts", "--workers", help="Ranks, one a host.")] = 4,
    latency_ms: Annotated[float, typer.Option(help="Milliseconds that a message between hosts takes.")] = 0.1,
    step_ms: Annotated[
        float | None,
        typer.Option(help="What computing a step takes, of a model of your own; built-in ones are measured."),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Of a worker, for a built-in task.", show_default="the task's own")
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            help="A candidate; may be given several times.",
            autocompletion=complete_codec,
            show_default=", ".join(CANDIDATES),
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also for every power of two of hosts up to --hosts.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="With --simulate: draw it; .png, .svg or .pdf.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how gradients would travel over a link, and how long a step would take, without training.

    The model's gradients are computed here, each candidate is tried on them, and the network is a calculation: hosts
    are as fast as this machine. For every bucket of DDP the table has the codec that would be chosen, its bytes, and
    when it would be ready and done. Of a model of your own only sizes are known, not what a codec loses of its
    gradients.

    Examples:

      $ gradwire plan --rate 100mbit
      $ gradwire plan --model charlm --rate 1gbit --hosts 8
      $ gradwire plan --simulate --hosts 64 --rate 10gbit
      $ gradwire plan --model torch.nn:Transformer --step-ms 200
    """
    bits = parse_rate(rate, argument="--rate")
    if not 2 <= hosts <= _MOST_HOSTS:
        raise ConfigError(f"`--hosts` must be from 2 to {_MOST_HOSTS}; got {hosts}.")
    if not 0 <= latency_ms <= _LONGEST_MS:
        raise ConfigError(f"`--latency-ms` must be from 0 to {_LONGEST_MS:g}; got {latency_ms}.")
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"`--batch-size` must be at least 1; got {batch_size}.")
    if model in TASKS and step_ms is not None:
        raise ConfigError(f"`--step-ms` is for a model of your own: a step of {model} is measured; got {step_ms}.")
    if model not in TASKS and batch_size is not None:
        raise ConfigError(f"`--batch-size` is for {' and '.join(TASKS)}: of {model!r} no step is computed.")
    if plot is not None:
        if not simulate:
            raise ConfigError("`--plot` needs `--simulate`.")
        check_picture(plot)
    candidates = Auto(tuple(codecs or CANDIDATES)).candidates
    with errors.status("measuring"):
        workload = _workload(model, step_ms, batch_size)
        counts = _counts(hosts) if simulate else [hosts]
        tried, plans = try_on_workload(workload, 2, candidates), []
        for count in counts:
            network = network_of(bits, count, latency_ms / 1000)
            trials = trials_among(tried, count)
            plans.append(plan_on_paper(workload, count, network, candidates=candidates, trials=trials))
    if plot is not None:
        draw_scaling(counts, plans, f"{model}, {rate}", plot)
    if as_json:
        shown = {str(count): _as_json(each) for count, each in zip(counts, plans, strict=True)}
        print_json({"model": model, "rate": rate, "parameters": workload.parameters, "plans": shown})
        return
    if simulate:
        show(_scaling_table(model, rate, counts, plans))
    show(plan_table(plans[-1], f"{model}: {workload.parameters:,} parameters, {hosts} hosts, {rate}"))
    if not workload.gradients:
        console.print("Without gradients nobody knows what a method loses of them: train with --codec auto for that.")


def _counts(hosts: int) -> list[int]:
    powers = [1 << exponent for exponent in range(1, hosts.bit_length()) if 1 << exponent < hosts]
    return [*powers, hosts]


def _workload(model: str, step_ms: float | None, batch_size: int | None) -> Workload:
    if model in TASKS:
        task = TASKS[model](batch_size=batch_size or BATCH_SIZES[model])
        task.load()
        network = task.model()
        optimizer = task.optimizer(network)

        def loss_of_step(step: int) -> Tensor:
            if step:
                optimizer.step()
            return task.loss(network, *task.batch(step, 0, 1))

        return profile_workload(network, loss_of_step)
    if ":" not in model:
        raise ConfigError(f"`--model` must be one of {', '.join(TASKS)}, or package.module:function; got {model!r}.")
    if step_ms is None or not 0 < step_ms <= _LONGEST_MS:
        raise ConfigError(
            f"`--step-ms` must say how long computing a step of {model!r} takes: above 0, at most {_LONGEST_MS:g}; "
            f"got {step_ms}."
        )
    return describe_workload(_made(model), step_ms / 1000)


def _made(name: str) -> nn.Module:
    module, _, function = name.partition(":")
    sys.path.insert(0, "")  # as python -m would find it
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"`--model` must be package.module:function; {name!r}: {error}.") from error
    except Exception as error:  # whatever the user's function does
        raise ConfigError(f"`--model` {name!r} could not be made: {type(error).__name__}: {error}.") from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"`--model` must return a torch.nn.Module; {name!r} returned {type(made).__name__}.")
    return made


def plan_table(plan: Plan, title: str) -> Table:
    """A plan for people: a line a bucket, and the step under it.

    >>> from gradwire.planner.simulate import describe_workload, network_of, plan_on_paper
    >>> paper = plan_on_paper(describe_workload(nn.Linear(512, 512), 0.1), 4, network_of(1e8, 4), candidates=["int4"])
    >>> plan_table(paper, "a layer").row_count
    1
    """
    rows = [
        [
            str(number),
            f"{bucket.parameters:,}",
            size(bucket.dense_bytes),
            bucket.method,
            size(bucket.sent_bytes),
            f"{1000 * bucket.ready_s:.1f}",
            f"{1000 * bucket.predicted_s:.1f}",
            f"{1000 * bucket.measured_s:.1f}" if bucket.measured_s is not None else "",
        ]
        for number, bucket in enumerate(plan.buckets)
    ]
    columns = {"bucket": "right", "parameters": "right", "dense": "right", "travels as": "left", "sent": "right"}
    columns |= {"ready, ms": "right", "takes, ms": "right", "measured": "right"}
    others = ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in plan.alternatives.items())
    measured = f", measured {1000 * plan.measured_s:.0f} ms" if plan.measured_s is not None else ""
    caption = (
        f"A step: {1000 * plan.predicted_s:.0f} ms expected{measured}; {1000 * plan.computing_s:.0f} are computing. "
        f"Everything by one method, ms: {others}."
    )
    return table(title, columns, rows, caption)


def _scaling_table(model: str, rate: str, counts: Sequence[int], plans: Sequence[Plan]) -> Table:
    names = list(plans[0].alternatives)
    columns = {"hosts": "right"} | dict.fromkeys(names, "right")
    columns |= {"plan": "right", "sent by a host": "right", "computing": "right", "by": "left"}
    rows = [
        [
            str(count),
            *(f"{1000 * plan.alternatives[name]:.0f}" for name in names),
            f"{1000 * plan.predicted_s:.0f}",
            size(sum(bucket.sent_bytes for bucket in plan.buckets)),
            f"{plan.computing_s / plan.predicted_s:.0%}",
            plan.name,
        ]
        for count, plan in zip(counts, plans, strict=True)
    ]
    caption = "Milliseconds a step. Hosts are as fast as this machine; the ring of dense takes two latencies a host."
    return table(f"{model} over {rate}", columns, rows, caption)


def _as_json(plan: Plan) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(plan.to_json())
    return told
