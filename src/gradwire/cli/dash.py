"""``gradwire dash``: a page that shows runs while they go on."""

from __future__ import annotations

import ipaddress
import signal
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer

from gradwire.cli.output import errors
from gradwire.dashboard.server import PORT, DashboardServer
from gradwire.dashboard.store import Store

__all__ = ["FoldersArgument", "dash"]

FoldersArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN_DIR...", help="Folders of runs, or folders that hold such; what appears in them later is found."
    ),
]


def dash(
    folders: FoldersArgument,
    host: Annotated[
        str, typer.Option(help="Address to serve at; others than this machine's own need a trusted network.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"To serve at; {PORT}, or a free one, if not given. 0 for a free one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show runs in a browser, while they go on and afterwards.

    It prints an address with a token in it, which is needed to see anything, and serves until Ctrl-C. Runs are only
    read; nothing is loaded from elsewhere.

    Examples:

      $ gradwire dash runs/first
      $ gradwire dash runs --port 9000
    """
    with Store(folders) as store, DashboardServer(store, host, port) as server:
        if not _is_local(host):
            errors.print(
                f"[bold yellow]warning:[/] {host} is reached from other machines, and what is sent is not encrypted: "
                "whoever reads along has the token. Over ssh -L there is no need for it.",
                highlight=False,
                soft_wrap=True,
            )
        # Not an Event: its lock is not reentrant, and a signal that comes while `wait` takes it would wait for ever.
        ends: SimpleQueue[int] = SimpleQueue()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: ends.put(number))
        thread = threading.Thread(target=server.serve_forever, name="gradwire-dashboard-http", daemon=True)
        thread.start()
        typer.echo(f"{server.url}\nCtrl-C to end")
        ends.get()
        server.shutdown()
        thread.join()


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
