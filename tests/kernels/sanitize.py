"""The fuzz on an extension built elsewhere: ``python -m tests.kernels.sanitize FOLDER [options of fuzz]``."""

import importlib.util
import sys
from pathlib import Path


def load(folder):
    """Make that extension the one gradwire imports."""
    (file,) = Path(folder).resolve().glob("_native*.so")
    spec = importlib.util.spec_from_file_location("gradwire._native", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gradwire._native"] = module
    spec.loader.exec_module(module)
    return file


if __name__ == "__main__":
    where = load(sys.argv.pop(1))
    from gradwire import _native

    assert _native.__file__ == str(where), f"{_native.__file__} was loaded instead of {where}"
    from tests.kernels import fuzz

    fuzz.main()
