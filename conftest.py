"""Sources whose extra is not installed here, or that need a newer torch, cannot be imported, nor their examples run."""

from importlib.util import find_spec

from tests.installed import HAS_FSDP2

_TRAINERS = ("accelerate", "lightning", "transformers")
_FSDP2 = ("src/gradwire/adapters/fsdp2.py", "tests/engines/test_fsdp2.py", "tests/workers/fsdp2.py")

collect_ignore = [
    *(f"src/gradwire/adapters/{name}.py" for name in _TRAINERS if find_spec(name) is None),
    *(f"tests/workers/{name}_rank.py" for name in _TRAINERS),  # programs, without tests
    *(("src/gradwire/telemetry/trackers.py",) if find_spec("tensorboard") is None else ()),
    *(() if HAS_FSDP2 else _FSDP2),
]
