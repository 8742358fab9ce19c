"""What the installed torch has; known without importing torch."""

from importlib.metadata import version

TORCH = tuple(map(int, version("torch").split(".")[:2]))
HAS_FSDP2 = TORCH >= (2, 9)
"""FSDP2 takes all-gathers and reduce-scatters of others, such as gradwire's."""
