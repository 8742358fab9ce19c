"""``gradwire bench exchange``: how much of a link the exchange of gradients uses."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from gradwire.benchmarks.exchange import Settings, measure
from gradwire.cli.completion import complete_codec
from gradwire.cli.output import JsonOption, errors, listed, print_json, show, size, table

__all__ = ["exchange"]


def exchange(
    workers: Annotated[int, typer.Option(help="Ranks, one a host.")] = 4,
    rates: Annotated[
        list[str] | None,
        typer.Option(
            "--rate", help="A link, e.g. 100mbit; several times. It needs root.", show_default=listed(Settings.rates)
        ),
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option(
            "--codec",
            help="May be given several times.",
            autocompletion=complete_codec,
            show_default=listed(Settings.codecs),
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    as_json: JsonOption = False,
) -> None:
    """Time the exchange of gradients over shaped links, beside gloo's all_to_all of as many bytes.

    How much of a link's rate is used by the exchange in two stages, encoding and decoding included. Needs root.

    Example:

      $ sudo gradwire bench exchange --workers 2 --rate 1gbit --codec int4
    """
    settings = Settings(workers, tuple(rates or Settings.rates), tuple(codecs or Settings.codecs), rounds)
    with errors.status("starting") as status:
        found = measure(settings, status.update)
    if as_json:
        print_json({rate: {name: asdict(each) for name, each in there.items()} for rate, there in found.items()})
        return
    rows = [
        [rate, name, size(each.sent_bytes), f"{1000 * each.seconds:.1f}", f"{each.efficiency:.3f}"]
        for rate, there in found.items()
        for name, each in there.items()
    ]
    columns = {"link": "left", "": "left", "sent by a rank": "right", "ms": "right", "of the rate": "right"}
    caption = f"Median of {rounds} interleaved rounds of four buckets, codec included; headers alone leave 0.956."
    show(table(f"exchange in two stages, {workers} workers", columns, rows, caption))
