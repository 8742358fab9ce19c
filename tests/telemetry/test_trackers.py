"""The trackers themselves, with what they write read back by their own readers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire.telemetry import Telemetry, TensorBoard

# Trackers warn, change global state and start processes: each has a process of its own.
TRAINING = """
from gradwire.telemetry import MLflow, Telemetry, WandB

def train(sink):
    with Telemetry(sink) as telemetry:
        telemetry.start(rank=0, ranks=2, codec="int4", parameters=100)
        for step in range(1, 4):
            telemetry.step(step, loss=1.0 / step, sent=10, dense=80)
        telemetry.record("quality", step=3, layers={"0.weight": {"error": 0.25, "residual": None}})
        telemetry.record("note", step=3, what="a note")
"""
MLFLOW = (
    TRAINING
    + """
import mlflow
mlflow.set_tracking_uri("file://" + FOLDER + "/mlruns")
with mlflow.start_run() as run:
    train(MLflow())
    assert mlflow.active_run() is not None  # what the user opened stays open
client = mlflow.MlflowClient()
history = client.get_metric_history(run.info.run_id, "loss")
assert [(m.step, m.value) for m in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)], history
found = client.get_run(run.info.run_id).data
assert found.metrics["bytes/ratio"] == 0.125 and found.metrics["error/0.weight"] == 0.25, found.metrics
assert found.params["gradwire.codec"] == "int4" and found.tags["gradwire.note.3"] == "a note"
print("all of it")
"""
)
WANDB = (
    TRAINING
    + """
import wandb
run = wandb.init(mode="offline")
train(WandB())
assert wandb.run is run  # what the user opened stays open
summary = dict(run.summary)
assert summary["gradwire/loss"] == 1 / 3 and summary["gradwire/step"] == 3, summary
assert summary["gradwire/error/0.weight"] == 0.25, summary
assert run.config["gradwire.codec"] == "int4"
run.finish()
print("all of it")
"""
)


@pytest.mark.full
def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Telemetry(TensorBoard(tmp_path)) as telemetry:
        telemetry.start(rank=0, ranks=2)
        for step in range(1, 4):
            telemetry.step(step, loss=1.0 / step, sent=10, dense=80)
        telemetry.record("note", step=3, what="a <b>note</b>")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert [each.value for each in events.Scalars("bytes/ratio")] == [0.125] * 3
    assert b"&lt;b>note" in events.Tensors("notes/text_summary")[0].tensor_proto.string_val[0]


@pytest.mark.full
@pytest.mark.parametrize("program", [MLFLOW, WANDB], ids=["mlflow", "wandb"])
def test_a_tracker_reads_it_back(program: str, tmp_path: Path) -> None:
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    quiet |= {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = subprocess.run(
        [sys.executable, "-c", f"FOLDER = {str(tmp_path)!r}\n{program}"],
        env=os.environ | quiet | {"HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout.strip().endswith("all of it"), done.stderr[-3000:]
