"""``gradwire doctor``: what this machine has, what it lacks, and how fast its links are."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any, Final

import torch.distributed as dist
import typer
from rich.markup import escape
from rich.table import Table

from gradwire.cli.output import JsonOption, console, errors, print_json, show, table
from gradwire.clusters import run_workers
from gradwire.doctor import (
    Finding,
    Level,
    LinkReport,
    machine_findings,
    network_findings,
    optional_findings,
    software_findings,
    worst,
)
from gradwire.doctor.links import measure_links
from gradwire.errors import ConfigError, GradwireError, PeerError

__all__ = ["doctor"]

_JOINED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
_STYLES: Final[dict[Level, str]] = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_MOST_WORKERS: Final = 64
_PATIENCE_S: Final = 60.0


def doctor(
    workers: Annotated[
        int,
        typer.Option(
            help="Start so many processes and measure the links between them, over loopback; 0: do not. Under "
            "torchrun: its ranks, whatever the number."
        ),
    ] = 2,
    as_json: JsonOption = False,
) -> None:
    """Look at this machine: what is missing, and the command that mends it.

    Python, torch and its devices, the kernels in use, the backends of torch.distributed, network interfaces and the one
    that ranks would use, optional parts, processors, cache and clock. Then processes are started that send each other
    messages: how fast that is, beside gloo's own all-reduce.

    Each line is ok, a warning (it works, worse than it could) or a problem (it does not work). A problem makes the exit
    status 1; warnings do not.

    Between machines: start it by torchrun, as a training would be, and rank 0 prints the speed of every link.

    Examples:

      $ gradwire doctor
      $ gradwire doctor --workers 0 --json
      $ torchrun --nproc-per-node 2 -m gradwire doctor
    """
    if not 0 <= workers <= _MOST_WORKERS:
        raise ConfigError(f"`--workers` must be from 0 to {_MOST_WORKERS}; got {workers}.")
    joined, rank = all(name in os.environ for name in _JOINED), int(os.environ.get("RANK", "0"))
    with errors.status("looking"):
        sections = {
            "software": software_findings(),
            "machine": machine_findings(),
            "network": network_findings(),
            "optional": optional_findings(),
        }
    links, sections["links"] = (None, []) if not workers else _links(None if joined else workers)
    verdict = worst(each for several in sections.values() for each in several)
    if rank == 0:
        _print(sections, links, verdict, as_json)
    else:
        _print_problems(rank, sections)
    if verdict == "problem":
        raise typer.Exit(1)


def _links(workers: int | None) -> tuple[LinkReport | None, list[Finding]]:
    """Of processes that are started, or of the ranks that torchrun has started."""
    where = "the ranks of torchrun" if workers is None else f"{workers} processes"
    try:
        with errors.status(f"measuring links between {where}"):
            report = _links_of_torchrun() if workers is None else _links_of_processes(workers)
    except (GradwireError, RuntimeError) as error:
        fact = f"{where} could not measure them: {str(error).splitlines()[0]}"
        fix = "gradwire doctor --workers 0   # is the network sound without them?"
        if workers is None:
            fix = "export GLOO_SOCKET_IFNAME=eth0   # on every machine, the interface that they share"
        return None, [Finding("links", "problem", fact, fix)]
    return report, list(report.findings)


def _links_of_processes(workers: int) -> LinkReport:
    for event in run_workers("gradwire.doctor.rank", {}, workers):
        if event.pop("event") == "links":
            return LinkReport.of(event)
    raise PeerError("the processes ended without a word")


def _links_of_torchrun() -> LinkReport:
    from gradwire.clusters.torchrun import join

    join("gloo", timeout_s=_PATIENCE_S)
    try:
        return measure_links(dist.get_rank(), dist.get_world_size(), timeout_s=_PATIENCE_S)
    finally:
        dist.destroy_process_group()


def _print(sections: dict[str, list[Finding]], links: LinkReport | None, verdict: Level, as_json: bool) -> None:
    if as_json:
        checks = [{"section": name, **asdict(each)} for name, several in sections.items() for each in several]
        print_json({"verdict": verdict, "checks": checks, "links": _links_as_json(links)})
        return
    for name, several in sections.items():
        if several:
            console.print(f"[bold]{name}[/]")
            for each in several:
                _print_finding(each)
    if links is not None and links.pairs:
        show(_link_table(links))
    found = [each.level for several in sections.values() for each in several]
    problems, warnings = found.count("problem"), found.count("warning")
    console.print(
        f"{_count(problems, 'problem')}, {_count(warnings, 'warning')}", style=_STYLES[verdict], highlight=False
    )


def _print_problems(rank: int, sections: dict[str, list[Finding]]) -> None:
    """Of a rank whose machine is not that of the one that prints."""
    for each in (each for several in sections.values() for each in several if each.level == "problem"):
        fix = f"; fix: {each.fix}" if each.fix else ""
        errors.print(f"rank {rank}: {each.name}: {escape(each.fact + fix)}", highlight=False, soft_wrap=True)


def _links_as_json(links: LinkReport | None) -> dict[str, Any] | None:
    if links is None:
        return None
    told = links.as_json()
    del told["findings"]  # among the checks already
    return told


def _print_finding(each: Finding) -> None:
    style, color = f"{each.level:<8}", _STYLES[each.level]
    console.print(f"  [{color}]{style}[/] {each.name:<16} {escape(each.fact)}", highlight=False, soft_wrap=True)
    if each.fix is not None:
        console.print(f"{'':28}[dim]fix:[/] {escape(each.fix)}", highlight=False, soft_wrap=True)


def _link_table(links: LinkReport) -> Table:
    columns = {"ranks": "left", "addresses": "left", "Mbit/s": "right", "ms": "right"}
    columns |= {"all-reduce, Mbit/s": "right", "all-reduce, ms": "right"}
    rows = [
        [
            f"{a} - {b}",
            " - ".join(dict.fromkeys((links.addresses[a], links.addresses[b]))),
            *((f"{each.mbit_s:,.0f}", f"{each.ms:.2f}") if each.error is None else ("none", "")),
            *((f"{each.all_reduce_mbit_s:,.0f}", f"{each.all_reduce_ms:.2f}") if each.error is None else ("none", "")),
        ]
        for each in links.pairs
        for a, b in [each.ranks]
    ]
    caption = (
        "What a rank sends while it receives as much, and the time of a short message; the same of gloo's all-reduce "
        "of the two. One pair at a time."
    )
    if len(links.pairs) < len(links.hosts) * (len(links.hosts) - 1) // 2:
        caption += " Neighbours only: there are many ranks."
    return table("links", columns, rows, caption)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
