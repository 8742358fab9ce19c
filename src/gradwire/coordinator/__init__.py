"""Asynchronous training: workers add gradients whenever they have them, anyone reads the current parameters."""

from gradwire.coordinator.gradients import DistributedGradientsCoordinator
from gradwire.coordinator.models import DistributedModelParametersCoordinator
from gradwire.coordinator.rules import Staleness

__all__ = ["DistributedGradientsCoordinator", "DistributedModelParametersCoordinator", "Staleness"]
