"""How payloads become a mean on every rank."""

from gradwire.collectives.base import Collective, Pending, Reduced
from gradwire.collectives.gather import Gather

__all__ = ["Collective", "Gather", "Pending", "Reduced"]
