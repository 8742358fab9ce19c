"""Hosts with slow links, on one Linux machine.

Training over a real network needs several machines; a lab needs one. Its hosts are network namespaces, joined by a
bridge, and each link is shaped to a rate. A training started in it meets true TCP at that rate, and the bytes it
sends are counted with every header.

>>> with Lab.up(4, "100mbit") as lab:  # doctest: +SKIP
...     outcome = lab.run(["python", "train.py"])
...     lab.wire_bytes(rank=0)

It needs root, because it makes network namespaces; :func:`unavailable` says what else is missing.
"""

from gradwire.lab.arguments import parse_rate
from gradwire.lab.network import Lab
from gradwire.lab.ranks import Outcome, Output
from gradwire.lab.state import Host
from gradwire.lab.tools import unavailable

__all__ = ["Host", "Lab", "Outcome", "Output", "parse_rate", "unavailable"]
