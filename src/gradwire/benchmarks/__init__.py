"""Measurements: our operations beside plain torch, ``torch.compile``, other libraries, and the limit of the machine."""

from gradwire.benchmarks.codecs import Report, Result, Settings, run

__all__ = ["Report", "Result", "Settings", "run"]
