"""``gradwire serve``: the coordinator as a service, and what is done to one."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gradwire.cli.manual import EXIT_STATUS, Group, command, manual
from gradwire.cli.output import JsonOption, console, errors, print_json, show, size, table
from gradwire.coordinator.access import ROLES, Worker, new_token, token_hash
from gradwire.coordinator.client import CoordinatorClient
from gradwire.coordinator.connection import Credentials
from gradwire.coordinator.journal import repair as repair_journal
from gradwire.coordinator.server import Server
from gradwire.coordinator.settings import ServeSettings, load_settings
from gradwire.errors import ConfigError

__all__ = ["serve"]

_TOKEN: Final = "GRADWIRE_TOKEN"

_ABOUT: Final = """Serve a model to workers that push gradients whenever they have them.

Without a command it serves, at 127.0.0.1:7070 and in memory unless --config says otherwise, until SIGTERM or Ctrl-C;
then it finishes what has come, saves, and ends with status 0. The commands ask something of a server that runs.

Examples:

  $ gradwire serve --config serve.toml
  $ gradwire serve status 127.0.0.1:7070
  $ gradwire serve token alice >> serve.toml
"""

serve = typer.Typer(cls=Group, help=manual(_ABOUT), epilog=EXIT_STATUS)

AddressArgument = Annotated[str, typer.Argument(help="HOST:PORT of the server.", metavar="ADDRESS")]
AuthorityOption = Annotated[
    Path | None, typer.Option("--authority", help="Certificate that the server's is signed by: connect with TLS.")
]
CertificateOption = Annotated[Path | None, typer.Option("--certificate", help="Your own, if the server asks for one.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Of your certificate.")]


@serve.callback(invoke_without_command=True, help=manual(_ABOUT))
def _serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings of the server, in TOML; docs/coordinator.md has them.")
    ] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what has come, save, and end."""
    if context.invoked_subcommand is not None:
        source = context.get_parameter_source("config")
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError("`--config` is for serving; leave it out, or the command after it.")
        return
    settings = ServeSettings() if config is None else load_settings(config)
    faulthandler.enable()  # a service that crashes in native code must say where
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    Server(settings).run(_announce)
    console.print("saved and ended" if settings.durability.folder is not None else "ended")


def _announce(server: Server) -> None:
    kept = server.settings.durability
    where = f"kept in {kept.folder}, fsync {kept.fsync}" if kept.folder is not None else "kept in memory only"
    console.print(f"serving at {server.address}, {where}", soft_wrap=True)
    if server.version is not None:
        console.print(f"version {server.version}, {server.replayed} pushes replayed", soft_wrap=True)
    if server.metrics_address is not None:
        console.print(f"metrics at http://{server.metrics_address}/metrics", soft_wrap=True)


def _client(address: str, authority: Path | None, certificate: Path | None, key: Path | None) -> CoordinatorClient:
    known = Credentials(os.environ.get(_TOKEN), authority, certificate, key)
    return CoordinatorClient(address, credentials=known, retry_s=5.0)


@command(serve)
def status(
    address: AddressArgument,
    as_json: JsonOption = False,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Show what a server does.

    Its model, what has been applied and refused, and how old gradients were. A token is taken from GRADWIRE_TOKEN.

    Examples:

      $ gradwire serve status 127.0.0.1:7070
      $ gradwire serve status trainer:7070 --authority ca.pem --json
    """
    with _client(address, authority, certificate, key) as client:
        told = client.status()[0]
    about = _about(told)
    if as_json:
        print_json(about)
        return
    state = "draining" if told.draining else "ready" if told.ready else told.trouble or "no model yet"
    rows = [
        ["state", state],
        ["model", f"{told.parameters:,} numbers, version {told.version:,}"],
        ["kept", f"on disk, fsync {told.durability}" if told.durability else "in memory only"],
        ["pushes applied", f"{told.applied:,}, {told.applied / max(told.seconds, 1e-9):.1f} a second"],
        ["sent again", f"{told.repeated_pushes:,}"],
        ["refused", ", ".join(f"{name} {number:,}" for name, number in sorted(told.refused.items())) or "none"],
        ["being received", f"{told.queued:,}"],
        ["workers", f"{told.workers:,}"],
        ["staleness", _ages(dict(told.ages))],
        ["received, sent", f"{size(told.bytes_received)}, {size(told.bytes_sent)}"],
        ["up", f"{told.seconds:,.0f} s, gradwire {told.gradwire}"],
    ]
    show(table(address, {"": "left", "now": "left"}, rows))


def _about(told: Any) -> dict[str, Any]:
    values = {each.name: getattr(told, each.name) for each in told.DESCRIPTOR.fields}
    return {name: dict(value) if name in ("refused", "ages") else value for name, value in values.items()}


def _ages(ages: dict[int, int]) -> str:
    if not ages:
        return "no versions given"
    total, mean = sum(ages.values()), sum(age * number for age, number in ages.items()) / sum(ages.values())
    return f"{mean:.1f} versions on average, at most {max(ages)}, {total:,} gradients"


@command(serve)
def snapshot(
    address: AddressArgument,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Have a server save its model now; pushes go on meanwhile.

    A token with the role admin is taken from GRADWIRE_TOKEN.

    Example:

      $ gradwire serve snapshot 127.0.0.1:7070
    """
    with _client(address, authority, certificate, key) as client:
        client.snapshot()
    console.print("saved")


@command(serve)
def drain(
    address: AddressArgument,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Have a server finish what has come, save, and end.

    A token with the role admin is taken from GRADWIRE_TOKEN.

    Example:

      $ gradwire serve drain 127.0.0.1:7070
    """
    with _client(address, authority, certificate, key) as client:
        client.drain()
    console.print("draining")


@command(serve)
def token(
    name: Annotated[str, typer.Argument(help="Of the worker.", metavar="NAME")],
    role: Annotated[
        list[str] | None,
        typer.Option(
            "--role", help=f"What it may do, of {', '.join(ROLES)}; several times.", show_default="push, read"
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a token for a worker, and its hash for the server's settings.

    Standard output is the table for serve.toml, which holds the hash; the token itself is printed once, to standard
    error, and is for the worker's GRADWIRE_TOKEN. With --json both are in the document.

    Examples:

      $ gradwire serve token alice >> serve.toml
      $ gradwire serve token operator --role admin --role read
    """
    secret = new_token()
    worker = Worker(name, token_hash(secret), tuple(role or ("push", "read")))
    if as_json:
        print_json({"name": name, "token_sha256": worker.token_sha256, "roles": worker.roles, "token": secret})
        return
    typer.echo("[[workers]]")
    for key in ("name", "token_sha256", "roles"):
        value = getattr(worker, key)
        typer.echo(f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    errors.print(f"\nthe token, for the worker's eyes alone: {secret}", highlight=False, soft_wrap=True)


@command(serve)
def repair(
    path: Annotated[
        Path, typer.Argument(help="A journal that is damaged.", exists=True, dir_okay=False, metavar="FILE")
    ],
    as_json: JsonOption = False,
) -> None:
    """Cut a journal off where it is damaged; the whole of it is kept beside it.

    For a server that does not start because of its journal, and says so. Pushes after the damage are lost.

    Example:

      $ gradwire serve repair model/journal-0000000007
    """
    records, cut = repair_journal(path)
    if as_json:
        print_json({"records": records, "cut_bytes": cut, "kept_in": f"{path}.damaged" if cut else None})
        return
    kept = f"; all of it is in {path}.damaged" if cut else ""
    console.print(f"{records} records kept, {cut} bytes cut off{kept}", soft_wrap=True)
