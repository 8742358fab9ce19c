"""gradwire inside other people's training loops. Thin: no algorithm is here."""

from gradwire.adapters.ddp import Compression, compress
from gradwire.adapters.replica import Replica

__all__ = ["Compression", "Replica", "compress"]
