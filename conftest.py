"""Sources whose extra is not installed here cannot be imported, nor their examples run."""

from importlib.util import find_spec

collect_ignore = [
    f"src/gradwire/adapters/{name}.py"
    for name in ("accelerate", "lightning", "transformers")
    if find_spec(name) is None
]
