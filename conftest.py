"""Sources whose extra is not installed here cannot be imported, nor their examples run."""

from importlib.util import find_spec

_TRAINERS = ("accelerate", "lightning", "transformers")

collect_ignore = [
    *(f"src/gradwire/adapters/{name}.py" for name in _TRAINERS if find_spec(name) is None),
    *(f"tests/workers/{name}_rank.py" for name in _TRAINERS),  # programs, without tests
    *(("src/gradwire/telemetry/trackers.py",) if find_spec("tensorboard") is None else ()),
]
