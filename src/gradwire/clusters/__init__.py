"""How ranks are started."""

from gradwire.clusters.local import run_workers

__all__ = ["run_workers"]
