"""gradwire inside other people's training loops. Thin: no algorithm is here."""

from gradwire.adapters.ddp import Compression, compress

__all__ = ["Compression", "compress"]
