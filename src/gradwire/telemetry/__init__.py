"""What a training does, for those who watch it: records, and where they go.

A sink is one file here, or a class of yours with the same four methods (:class:`~gradwire.telemetry.base.Sink`).
"""

from gradwire.telemetry.base import RUN_FOLDER, Record, Sink, Telemetry
from gradwire.telemetry.jsonl import JsonLines
from gradwire.telemetry.memory import Memory
from gradwire.telemetry.metrics_server import MetricsServer
from gradwire.telemetry.prometheus import Prometheus
from gradwire.telemetry.trackers import MLflow, TensorBoard, WandB

__all__ = [
    "RUN_FOLDER",
    "JsonLines",
    "MLflow",
    "Memory",
    "MetricsServer",
    "Prometheus",
    "Record",
    "Sink",
    "Telemetry",
    "TensorBoard",
    "WandB",
]
