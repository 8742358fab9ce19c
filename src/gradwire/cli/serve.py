"""``gradwire serve``: the coordinator as a service, and what is done to one."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Final

import typer

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

serve = typer.Typer(help="Serve a model to workers that push gradients whenever they have them.")

AddressArgument = Annotated[str, typer.Argument(help="HOST:PORT of the server.")]
AuthorityOption = Annotated[
    Path | None, typer.Option("--authority", help="Certificate that the server's is signed by: connect with TLS.")
]
CertificateOption = Annotated[Path | None, typer.Option("--certificate", help="Your own, if the server asks for one.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="Of your certificate.")]


@serve.callback(invoke_without_command=True)
def _serve(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings, in TOML; docs/coordinator.md has them.")
    ] = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish what has come, save, and end."""
    if context.invoked_subcommand is not None:
        if config is not None:
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


@serve.command()
def status(
    address: AddressArgument,
    as_json: JsonOption = False,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Show what a server does. A token is taken from GRADWIRE_TOKEN."""
    with _client(address, authority, certificate, key) as client:
        told = client.status()[0]
    about = _about(told)
    if as_json:
        print_json(about)
        return
    state = "draining" if told.draining else "ready" if told.ready else "no model yet"
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


@serve.command()
def snapshot(
    address: AddressArgument,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Have a server save its model now; pushes go on meanwhile."""
    with _client(address, authority, certificate, key) as client:
        client.snapshot()
    console.print("saved")


@serve.command()
def drain(
    address: AddressArgument,
    authority: AuthorityOption = None,
    certificate: CertificateOption = None,
    key: KeyOption = None,
) -> None:
    """Have a server finish what has come, save, and end."""
    with _client(address, authority, certificate, key) as client:
        client.drain()
    console.print("draining")


@serve.command()
def token(
    name: Annotated[str, typer.Argument(help="Of the worker.")],
    role: Annotated[list[str] | None, typer.Option("--role", help=f"Of {', '.join(ROLES)}; several times.")] = None,
) -> None:
    """Draw a token for a worker: it is printed once, and its hash for the server's settings."""
    secret = new_token()
    worker = Worker(name, token_hash(secret), tuple(role or ("push", "read")))
    typer.echo("[[workers]]")
    for key in ("name", "token_sha256", "roles"):
        value = getattr(worker, key)
        typer.echo(f"{key} = {json.dumps(list(value) if isinstance(value, tuple) else value)}")
    errors.print(f"\nthe token, for the worker's eyes alone: {secret}", highlight=False, soft_wrap=True)


@serve.command()
def repair(
    path: Annotated[Path, typer.Argument(help="A journal that is damaged.", exists=True, dir_okay=False)],
) -> None:
    """Cut a journal off where it is damaged; the whole of it is kept beside it."""
    records, cut = repair_journal(path)
    kept = f"; all of it is in {path}.damaged" if cut else ""
    console.print(f"{records} records kept, {cut} bytes cut off{kept}", soft_wrap=True)
