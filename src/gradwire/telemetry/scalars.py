"""The numbers of a record, by name: what trackers draw."""

from __future__ import annotations

from typing import Final

from gradwire.telemetry.base import Record

__all__ = ["scalars"]

_STEP: Final = {
    "loss": "loss",
    "seconds": "time/step_s",
    "compute_s": "time/compute_s",
    "exposed_s": "time/exposed_s",
    "encode_s": "time/encode_s",
    "wire_s": "time/wire_s",
    "decode_s": "time/decode_s",
    "sent": "bytes/sent",
    "received": "bytes/received",
    "dense": "bytes/float32",
}
_VALIDATION: Final = {"loss": "validation/loss", "accuracy": "validation/accuracy"}


def scalars(record: Record) -> dict[str, float]:
    """Numbers of steps, validations, plans, and what is lost of each layer.

    >>> scalars({"event": "step", "step": 3, "loss": 0.5, "sent": 10, "dense": 80})
    {'loss': 0.5, 'bytes/sent': 10.0, 'bytes/float32': 80.0, 'bytes/ratio': 0.125}
    >>> scalars({"event": "quality", "layers": {"0.weight": {"error": 0.01, "residual": None}}})
    {'error/0.weight': 0.01}
    """
    event = record["event"]
    if event == "step":
        found = _named(record, _STEP)
        if found.get("bytes/float32") and "bytes/sent" in found:
            found["bytes/ratio"] = found["bytes/sent"] / found["bytes/float32"]
        return found
    if event == "validation":
        return _named(record, _VALIDATION)
    if event == "plan":
        return _named(record, {"predicted_s": "plan/predicted_s", "measured_s": "plan/measured_s"})
    if event == "quality":
        pairs = [(kind, name, layer) for name, layer in record["layers"].items() for kind in ("error", "residual")]
        return {f"{kind}/{name}": float(layer[kind]) for kind, name, layer in pairs if layer.get(kind) is not None}
    return {}


def _named(record: Record, names: dict[str, str]) -> dict[str, float]:
    return {shown: float(record[key]) for key, shown in names.items() if record.get(key) is not None}
