"""What a lab may be asked for, and the errors that say so."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from gradwire.errors import ConfigError

__all__ = ["MOST_HOSTS", "check_hosts", "check_name", "format_rate", "parse_rate"]

MOST_HOSTS: Final = 254  # the addresses of a /24

_UNITS: Final = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}
# Below, the smallest burst is more than a tenth of a second's worth; above, the queue outgrows tc's 32 bits.
_SLOWEST, _FASTEST = 1_000_000, 400_000_000_000


def parse_rate(rate: str | None, *, argument: str = "rate") -> int | None:
    """Bits a second of a rate as ``tc`` writes it; None for ``none``, a link that is not shaped.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit"), parse_rate("none")
    (100000000, 2500000000, None)
    >>> parse_rate("100mbps")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `rate` must be in kbit, mbit or gbit (bits a second), from 1mbit to 400gbit, such as
    '100mbit' or '2.5gbit', or 'none'; got '100mbps'.
    """
    if rate is None or rate == "none":
        return None
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(kbit|mbit|gbit)", rate.lower())
    bits = int(Decimal(found[1]) * _UNITS[found[2]]) if found else 0
    if not _SLOWEST <= bits <= _FASTEST:
        raise ConfigError(
            f"`{argument}` must be in kbit, mbit or gbit (bits a second), from {format_rate(_SLOWEST)} to "
            f"{format_rate(_FASTEST)}, such as '100mbit' or '2.5gbit', or 'none'; got {rate!r}."
        )
    return bits


def format_rate(bits: int | None) -> str:
    """The one way a rate is written.

    >>> format_rate(parse_rate("1000mbit")), format_rate(parse_rate("0.5GBIT")), format_rate(None)
    ('1gbit', '500mbit', 'none')
    """
    if bits is None:
        return "none"
    unit = "gbit" if bits >= _UNITS["gbit"] else "mbit"
    return f"{(Decimal(bits) / _UNITS[unit]).normalize():f}{unit}"


def check_hosts(hosts: int, *, argument: str = "hosts") -> None:
    """Refuse a number of hosts that cannot be made.

    >>> check_hosts(0)
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `hosts` must be from 1 to 254; got 0.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise ConfigError(f"`{argument}` must be from 1 to {MOST_HOSTS}; got {hosts}.")


def check_name(name: str, *, argument: str = "name") -> None:
    """Refuse a name that namespaces and files cannot carry.

    >>> check_name("../etc")
    Traceback (most recent call last):
    gradwire.errors.ConfigError: `name` must be 1 to 32 of a-z, 0-9 and -, and begin with a letter; got '../etc'.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,31}", name):
        raise ConfigError(f"`{argument}` must be 1 to 32 of a-z, 0-9 and -, and begin with a letter; got {name!r}.")
