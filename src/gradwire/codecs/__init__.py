"""The codecs, one flat file each. A module dropped into this package is registered by being there."""

import importlib
import pkgutil

from gradwire.codecs.base import EMPTY, Carrier, Codec, Laws, Layout, Part, State
from gradwire.codecs.registry import codec, register, registered

__all__ = [
    "EMPTY",
    "Carrier",
    "Codec",
    "Laws",
    "Layout",
    "Part",
    "State",
    "codec",
    "register",
    "registered",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
