"""``gradwire lab``: hosts with slow links, on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from gradwire.cli.manual import EXIT_STATUS, Group, command, manual
from gradwire.cli.output import JsonOption, console, errors, print_json, show, size, table
from gradwire.errors import ConfigError, LabError
from gradwire.lab import Lab, parse_rate
from gradwire.lab.arguments import check_hosts, check_name

__all__ = ["lab"]

lab = typer.Typer(
    cls=Group,
    help=manual(
        """Hosts with slow links, on this machine. Needs Linux and root.

        A lab is network namespaces on a bridge, with links of the rate you say: what runs in them is as far apart as on
        machines of their own. Commands that take --rate make labs by themselves; these are for programs of your own.

        Examples:

          $ sudo gradwire lab up --hosts 4 --rate 100mbit
          $ sudo gradwire lab run -- python train.py
          $ sudo gradwire lab down
        """
    ),
    epilog=EXIT_STATUS,
    no_args_is_help=True,
)

NameOption = Annotated[str, typer.Option(help="Name of the lab; several may be up at once.")]
RateOption = Annotated[
    str, typer.Option(help="Of every link, each way: 100mbit, 2.5gbit, ...; none: links that are not shaped.")
]


@command(lab)
def up(
    hosts: Annotated[int, typer.Option(help="How many hosts.")] = 4,
    rate: RateOption = "100mbit",
    name: NameOption = "lab",
    as_json: JsonOption = False,
) -> None:
    """Make a lab, and see that its first host reaches its last.

    It stays until `gradwire lab down`, or until the machine is started again.

    Examples:

      $ sudo gradwire lab up --hosts 2 --rate 1gbit
      $ sudo gradwire lab up --hosts 8 --rate none --name fast
    """
    check_hosts(hosts, argument="--hosts")
    _say(Lab.up(hosts, _rate(rate), name=_name(name)), as_json)


@command(lab, context_settings={"allow_interspersed_args": False})
def run(
    program: Annotated[
        list[str],
        typer.Argument(help="What every host runs, after --, such as: -- python train.py", metavar="COMMAND"),
    ],
    name: NameOption = "lab",
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which all ranks are ended, with status 124.", show_default=False)
    ] = None,
    rank0: Annotated[
        bool, typer.Option("--rank0", help="Standard output of rank 0 alone, instead of all as '\\[rank] line'.")
    ] = False,
) -> None:
    """Run a command on every host, one rank each, with the environment of torchrun.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, so that init_process_group needs no arguments.

    It ends with the status of the rank that failed first, and says which it was; 124 after --timeout.

    Examples:

      $ sudo gradwire lab run -- python train.py
      $ sudo gradwire lab run --rank0 --timeout 60 -- python -m gradwire doctor
    """
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"`--timeout` must be more than 0; got {timeout}.")
    found = Lab.find(_name(name))
    outcome = found.run(program, timeout_s=timeout, output="rank0" if rank0 else "all")
    if outcome.exit_status:
        errors.print(f"[bold red]error:[/] {outcome.story()}.", highlight=False, soft_wrap=True)
        raise typer.Exit(outcome.exit_status)


@command(lab, "show")
def show_labs(
    name: Annotated[str | None, typer.Option(help="Only the lab of this name.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the labs that are up: hosts, addresses, rates, and the bytes each host has sent.

    Bytes are the kernel's count, headers included.

    Examples:

      $ sudo gradwire lab show
      $ sudo gradwire lab show --name lab --json
    """
    labs = _facts(Lab.find_all() if name is None else [Lab.find(_name(name))])
    if as_json:
        print_json({"labs": labs})
    elif labs:
        for each in labs:
            show(_table(each))
    else:
        errors.print("no lab is up; make one with `gradwire lab up`", highlight=False)


@command(lab)
def reshape(rate: RateOption, name: NameOption = "lab", as_json: JsonOption = False) -> None:
    """Give every link of a lab another rate, under whatever runs.

    Connections stay: what is sent from now on travels at the new rate.

    Example:

      $ sudo gradwire lab reshape --rate 50mbit
    """
    text, found = _rate(rate), Lab.find(_name(name))
    found.reshape(text)
    _say(found, as_json)


@command(lab)
def down(name: NameOption = "lab") -> None:
    """Remove a lab.

    What still runs in it loses its network.

    Example:

      $ sudo gradwire lab down --name lab
    """
    Lab.find(_name(name)).down()


def _facts(labs: list[Lab]) -> list[dict[str, Any]]:
    facts = []
    for each in labs:
        try:
            sent = [each.wire_bytes(rank) for rank in range(len(each.hosts))]
        except LabError:
            if each.is_up():
                raise
            continue  # taken down in this moment
        hosts = [
            {"rank": rank, "namespace": host.namespace, "address": host.address, "sent_bytes": sent[rank]}
            for rank, host in enumerate(each.hosts)
        ]
        facts.append({"name": each.name, "rate": each.rate, "hosts": hosts})
    return facts


def _table(facts: dict[str, Any]) -> Table:
    columns = {"host": "right", "namespace": "left", "address": "left", "rate": "left", "bytes sent": "right"}
    rows = [
        (str(host["rank"]), host["namespace"], host["address"], _links(facts["rate"]), size(host["sent_bytes"]))
        for host in facts["hosts"]
    ]
    return table(f"lab {facts['name']}", columns, rows)


def _say(each: Lab, as_json: bool) -> None:
    if as_json:
        print_json(_facts([each])[0])
        return
    addresses = " to ".join(dict.fromkeys([each.hosts[0].address, each.hosts[-1].address]))
    count = f"{len(each.hosts)} host{'s' if len(each.hosts) > 1 else ''}"
    console.print(f"lab {each.name}: {count}, {addresses}, {_links(each.rate)}", highlight=False, soft_wrap=True)


def _links(rate: str | None) -> str:
    return rate or "not shaped"


def _name(name: str) -> str:
    check_name(name, argument="--name")
    return name


def _rate(rate: str) -> str:
    parse_rate(rate, argument="--rate")
    return rate
