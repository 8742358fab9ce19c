"""``gradwire bench coordinator``: the coordinator's service beside a socket, gloo and a Ray actor."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.benchmarks.coordinator import Settings, measure
from gradwire.cli.output import JsonOption, errors, print_json, show, table

__all__ = ["coordinator"]


def coordinator(
    mb: Annotated[int, typer.Option(help="Size of a large tensor, in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(help="Timed rounds of large tensors.")] = 9,
    seconds: Annotated[float, typer.Option(help="Of each run with small updates.")] = 5.0,
    ray: Annotated[bool, typer.Option("--ray", help="Beside a Ray actor too; it looks for public addresses.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Time the coordinator's pushes and pulls beside a socket, gloo and a Ray actor.

    Over loopback, all contenders in one run: large tensors, with and without TLS, then small updates of many clients.

    Example:

      $ gradwire bench coordinator --mb 8 --rounds 3 --seconds 1
    """
    settings = Settings(mb << 20, rounds, seconds, ray)
    with errors.status("starting") as status:
        found = measure(settings, status.update)
    if as_json:
        print_json(asdict(found))
        return
    rows = []
    for name, push in found.push_s.items():
        base = "socket, TLS" if name.endswith("TLS") else "socket"
        rate = [settings.nbytes / each / 1e9 for each in (push, found.pull_s[name])]
        share = [found.push_s[base] / push, found.pull_s[base] / found.pull_s[name]]
        rows.append([name, *(f"{each:.2f}" for each in rate), *(f"{each:.2f}" for each in share), f"{1 / push:.1f}"])
    columns = {"": "left", "push GB/s": "right", "pull GB/s": "right", "push / socket": "right"}
    columns |= {"pull / socket": "right", "pushes a second": "right"}
    show(table(f"{mb} MiB of float32 over loopback", columns, rows, f"Median of {rounds} interleaved rounds."))
    rows = [[f"10 KB, {name}", f"{each:,.0f} a second"] for name, each in found.small_per_s.items()]
    rows.append(["64 clients, the slowest over the median", f"{found.starved:.2f}"])
    show(table("small updates, applied", {"": "left", "found": "right"}, rows))
