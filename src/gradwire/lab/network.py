"""A lab: its hosts, their links, and what runs on them.

Each host is a network namespace with one interface, ``eth0``, a veth whose other end is a port of a bridge; the
bridge has a namespace of its own, so that nothing of a lab shows in the machine's network. A link is shaped where
packets leave: at the host's ``eth0`` for what it sends, at its bridge port for what it receives.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from gradwire.errors import ConfigError, LabError
from gradwire.lab import state, tools
from gradwire.lab.arguments import check_hosts, check_name, format_rate, parse_rate
from gradwire.lab.ranks import Outcome, Output, environment, run_ranks
from gradwire.lab.state import Host, Record

__all__ = ["Lab"]

_BRIDGE: Final = "br0"
_SUBNETS: Final = 256  # 10.77.0.0/24 to 10.77.255.0/24
_LEAST_BURST: Final = 16384  # about ten packets: less, and the token bucket starves between timer ticks
_LATENCY: Final = "50ms"
_UNSHAPED_PACKETS: Final = 10_000
# Not the machine's own choice: results must not depend on it, and bbr is three times slower on an unshaped veth.
_CONGESTION_CONTROL: Final = "reno"

# A refused connection has been to the other host and back; no server and no ping is needed.
_REACH: Final = """
import socket, sys, time
end = time.monotonic() + 5
while True:
    try:
        socket.create_connection((sys.argv[1], 9), timeout=1).close()
        break
    except ConnectionRefusedError:
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(str(error))
        time.sleep(0.05)
"""
_FREE_PORT: Final = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


class Lab:
    """Hosts with shaped links, made by :meth:`up` or found by :meth:`find`; a ``with`` block takes it down at its end.

    >>> with Lab.up(2, "100mbit", name="example") as lab:  # doctest: +SKIP
    ...     lab.run(["python", "-c", "import os; print(os.environ['RANK'])"])
    [0] 0
    [1] 1
    Outcome(statuses=(0, 0), failed=None, timed_out=False, seconds=0.05)
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._processes: list[subprocess.Popen[Any]] = []

    @classmethod
    def up(cls, hosts: int, rate: str | None, *, name: str = "lab") -> Lab:
        """Make a lab, and see that its first host reaches its last. None or ``none`` as rate: not shaped.

        >>> Lab.up(4, "fast")
        Traceback (most recent call last):
        gradwire.errors.ConfigError: `rate` must be in kbit, mbit or gbit (bits a second), from 1mbit to 400gbit, ...
        """
        check_hosts(hosts)
        check_name(name)
        rate = format_rate(parse_rate(rate))
        tools.require()
        with state.locked():  # to the end, so that nobody finds half a lab
            lab = cls(_claim(name, hosts, rate))
            try:
                lab._connect()
                lab._shape(rate)
                lab._verify()
            except BaseException:
                lab._remove()
                raise
        return lab

    @classmethod
    def find(cls, name: str = "lab") -> Lab:
        """The lab of that name, made by whichever process."""
        check_name(name)
        tools.require()
        with state.locked():
            labs = {record.name: record for record in state.read_all()}
        if name not in labs:
            names = ", ".join(labs)
            raise LabError(
                f"no lab {name!r} is up" + (f"; up: {names}." if names else "; make one with `gradwire lab up`.")
            )
        return cls(labs[name])

    @classmethod
    def find_all(cls) -> list[Lab]:
        """Every lab that is up on this machine, by name."""
        tools.require()
        with state.locked():
            return [cls(record) for record in state.read_all()]

    def is_up(self) -> bool:
        """Whether it is still up; another process may have taken it down."""
        with state.locked():
            return self._is_up()

    def down(self) -> None:
        """Remove the lab, and end what :meth:`popen` of this object still runs. A lab that is gone stays gone.

        Processes that others started in it lose their network.
        """
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        with state.locked():
            if self._is_up():
                self._remove()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def __repr__(self) -> str:
        return f"<Lab {self.name!r}: {len(self.hosts)} hosts, {self.rate or 'not shaped'}>"

    @property
    def name(self) -> str:
        """What :meth:`find` knows it by."""
        return self._record.name

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts; the index of one is its rank."""
        return self._record.hosts

    @property
    def rate(self) -> str | None:
        """Of every link, each way, such as ``100mbit``; None: not shaped."""
        return None if self._record.rate == "none" else self._record.rate

    def reshape(self, rate: str | None) -> None:
        """Give every link another rate, under whatever runs."""
        text = format_rate(parse_rate(rate))
        with state.locked():
            if not self._is_up():
                raise LabError(f"lab {self.name!r} is not up any more.")
            self._shape(text)
            self._record = replace(self._record, rate=text)
            state.write(self._record)

    def cut_inbound(self, rank: int) -> None:
        """Drop whatever is sent to a host, until the next :meth:`reshape`. What the host sends still arrives."""
        self._host(rank)
        with state.locked():
            if not self._is_up():
                raise LabError(f"lab {self.name!r} is not up any more.")
            port = self._ports()[rank]
            tools.call("tc", "-n", self._record.bridge, "qdisc", "replace", "dev", port, "root", "blackhole")

    def wire_bytes(self, rank: int) -> int:
        """Bytes a host has put on its link since the lab is up, Ethernet, IP and TCP headers of every packet included.

        From the queue's counter, as the kernel cuts large sends into packets behind the interface's. It starts again
        at 0 when :meth:`reshape` goes from a rate to none or back.
        """
        host = self._host(rank)
        queues = json.loads(tools.call("tc", "-n", host.namespace, "-s", "-j", "qdisc", "show", "dev", host.interface))
        sent = [q["bytes"] for q in queues if q.get("root")]
        if not sent:
            raise LabError(f"lab {self.name!r} is half made or half removed: host {rank} has no link.")
        return int(sent[0])

    def free_port(self) -> int:
        """A port that nobody listens on at host 0, for ``MASTER_PORT``."""
        return int(tools.python_inside(self.hosts[0].namespace, _FREE_PORT))

    def environment(self, rank: int) -> dict[str, str]:
        """The variables of a rank: those of torchrun, and ``GRADWIRE_LAB``, the name of the lab."""
        host = self._host(rank)
        variables = environment(rank, len(self.hosts), master=self.hosts[0].address, interface=host.interface)
        return {**variables, "GRADWIRE_LAB": self.name}

    def popen(
        self, rank: int, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command on the host of a rank, as :class:`subprocess.Popen` does and with its options.

        The environment is that of this process, then :meth:`environment`, then ``env``. ``MASTER_PORT`` is 29500
        unless ``env`` has another, the same for every rank.
        """
        process = self._start(rank, command, env, **options)
        self._processes.append(process)
        return process

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        output: Output = "all",
    ) -> Outcome:
        """Run a command on every host, one rank each, and wait for all.

        When a rank fails the others get a few seconds to notice and are then ended; so are all at the timeout.
        ``output`` says where standard output goes: ``all`` prints ``[rank] line``, ``rank0`` prints rank 0's as it
        is, a function is called with each rank and line.
        """
        _check_command(command)
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"`timeout_s` must be more than 0; got {timeout_s}.")
        if not callable(output) and output not in ("all", "rank0"):
            raise ConfigError(f"`output` must be 'all', 'rank0' or a function of rank and line; got {output!r}.")
        variables = {"MASTER_PORT": str(self.free_port()), **(env or {})}

        def start(rank: int, stdout: int) -> subprocess.Popen[bytes]:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
            return self._start(rank, command, variables, start_new_session=True, **pipes)

        return run_ranks(start, len(self.hosts), timeout_s=timeout_s, output=output)

    def _start(
        self, rank: int, command: Sequence[str], env: Mapping[str, str] | None, **options: Any
    ) -> subprocess.Popen[Any]:
        _check_command(command)
        variables = {**os.environ, **self.environment(rank), **(env or {})}
        return subprocess.Popen(tools.inside(self._host(rank).namespace, *command), env=variables, **options)

    def _host(self, rank: int) -> Host:
        if not 0 <= rank < len(self.hosts):
            raise ConfigError(f"`rank` must be from 0 to {len(self.hosts) - 1} in lab {self.name!r}; got {rank}.")
        return self.hosts[rank]

    def _is_up(self) -> bool:
        now = state.read(self.name)
        return now is not None and now.token == self._record.token

    def _remove(self) -> None:
        for namespace in filter(tools.namespace_exists, self._record.namespaces):
            tools.call("ip", "netns", "del", namespace)
        state.forget(self.name)

    def _connect(self) -> None:
        bridge = self._record.bridge
        tools.call("ip", "-n", bridge, "link", "add", _BRIDGE, "type", "bridge")
        tools.call("ip", "-n", bridge, "link", "set", _BRIDGE, "up")
        for host, port in zip(self.hosts, self._ports(), strict=True):
            inner, outer = ("ip", "-n", host.namespace), ("ip", "-n", bridge)
            veth = ("type", "veth", "peer", "name", host.interface, "netns", host.namespace)
            tools.call(*outer, "link", "add", port, *veth)
            tools.call(*outer, "link", "set", port, "master", _BRIDGE, "up")
            tools.call(*inner, "address", "add", f"{host.address}/24", "dev", host.interface)
            tools.call(*inner, "link", "set", "lo", "up")
            # Without an IPv6 address the kernel sends nothing of its own, and the counter counts the ranks alone.
            tools.call(*inner, "link", "set", host.interface, "addrgenmode", "none", "up")
            setting = "/proc/sys/net/ipv4/tcp_congestion_control"  # of the namespace that writes it
            tools.call_inside(host.namespace, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {setting}")

    def _shape(self, rate: str) -> None:
        for host, port in zip(self.hosts, self._ports(), strict=True):
            for namespace, device in ((host.namespace, host.interface), (self._record.bridge, port)):
                tools.call("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *_queue(rate))

    def _verify(self) -> None:
        first, last = self.hosts[0], self.hosts[-1]
        try:
            tools.python_inside(first.namespace, _REACH, last.address)
        except LabError as error:
            raise LabError(
                f"lab {self.name!r}: host 0 does not reach host {len(self.hosts) - 1} at {last.address}: {error}."
            ) from error

    def _ports(self) -> list[str]:
        return [f"port{rank}" for rank in range(len(self.hosts))]


def _claim(name: str, hosts: int, rate: str) -> Record:
    """Take the name, a subnet and the namespaces of a new lab. Only with the lock held."""
    others = state.read_all()
    if any(record.name == name for record in others):
        raise LabError(f"lab {name!r} is already up; remove it with `gradwire lab down --name {name}`.")
    subnet = next((x for x in range(_SUBNETS) if x not in {r.subnet for r in others}), None)
    if subnet is None:
        raise LabError(f"{_SUBNETS} labs are up, and no subnet is left; remove one with `gradwire lab down`.")
    record = Record.plan(name, os.urandom(8).hex(), hosts=hosts, subnet=subnet, rate=rate)
    for namespace in record.namespaces:
        if tools.namespace_exists(namespace):
            raise LabError(
                f"a network namespace {namespace!r} exists that no lab made; choose another name, or remove it with "
                f"`ip netns del {namespace}`."
            )
    state.write(record)  # before the namespaces: `down` finds them even if this process is killed now
    made: list[str] = []
    try:
        for namespace in record.namespaces:
            tools.call("ip", "netns", "add", namespace)
            made.append(namespace)
    except BaseException:
        for namespace in made:
            with suppress(LabError):
                tools.call("ip", "netns", "del", namespace)
        state.forget(name)
        raise
    return record


def _queue(rate: str) -> list[str]:
    """The queue that makes a link of that rate, in the words of ``tc``.

    >>> " ".join(_queue("100mbit")), " ".join(_queue("none"))
    ('tbf rate 100000000bit burst 16384b latency 50ms', 'pfifo limit 10000')
    """
    bits = parse_rate(rate)
    if bits is None:
        return ["pfifo", "limit", str(_UNSHAPED_PACKETS)]
    burst = max(bits // 8 // 1000, _LEAST_BURST)  # a millisecond's worth
    return ["tbf", "rate", f"{bits}bit", "burst", f"{burst}b", "latency", _LATENCY]


def _check_command(command: Sequence[str]) -> None:
    if isinstance(command, str) or not command:
        raise ConfigError(f"`command` must be a list such as ['python', 'train.py']; got {command!r}.")
