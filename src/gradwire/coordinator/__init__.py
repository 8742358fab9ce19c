"""Asynchronous training: workers add gradients whenever they have them, anyone reads the current parameters."""

from gradwire.coordinator.client import CoordinatorClient, Pushed
from gradwire.coordinator.connection import Credentials
from gradwire.coordinator.gradients import DistributedGradientsCoordinator
from gradwire.coordinator.models import DistributedModelParametersCoordinator
from gradwire.coordinator.rules import Staleness
from gradwire.coordinator.server import Server, serve
from gradwire.coordinator.settings import ServeSettings, load_settings

__all__ = [
    "CoordinatorClient",
    "Credentials",
    "DistributedGradientsCoordinator",
    "DistributedModelParametersCoordinator",
    "Pushed",
    "ServeSettings",
    "Server",
    "Staleness",
    "load_settings",
    "serve",
]
