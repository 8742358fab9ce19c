"""Records of real trainings, and sinks that are full, slow or away."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.adapters.watch import Watch
from gradwire.clusters import run_workers
from gradwire.collectives.loopback import Loopback
from gradwire.errors import ConfigError
from gradwire.reducer import GradientReducer
from gradwire.telemetry import JsonLines, Memory, Prometheus, Telemetry


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_every_rank_of_a_training_tells_every_step(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = {"task": "digits", "codec": "topk:0.01+int8", "steps": 25, "run_folder": str(folder)}
    moved = [e for e in run_workers("gradwire.tasks.worker", settings, 2) if e["event"] == "step"]
    for rank in range(2):
        told = records(folder / f"rank-{rank}.jsonl")
        assert told[0]["event"] == "start"
        assert (told[0]["rank"], told[0]["ranks"], told[0]["steps"]) == (rank, 2, 25)
        assert told[0]["parameters"] == 2_030_058
        assert told[-1] == {**told[-1], "event": "done", "status": "done"}
        steps = [each for each in told if each["event"] == "step"]
        assert [each["step"] for each in steps] == list(range(1, 26))
        assert steps[0]["seconds"] is None  # nobody knows when the step before it ended
        layout = [each for each in told if each["event"] == "layout"][-1]["buckets"]
        assert sum(bucket["numel"] for bucket in layout) == 2_030_058
        for each in steps[2:]:
            assert len(each["buckets"]) == len(layout)
            assert abs(each["compute_s"] + each["exposed_s"] - each["seconds"]) < 1e-5
            assert each["encode_s"] > 0
            assert each["decode_s"] > 0
            assert all(b["codec"] == "ef(topk:0.01+int8)" for b in each["buckets"])
            assert all(b["ready_s"] < b["done_s"] <= each["seconds"] for b in each["buckets"])
            for name in ("sent", "received", "dense"):
                assert each[name] == sum(bucket[name] for bucket in each["buckets"])
        if rank == 0:
            assert [(s["loss"], s["sent"]) for s in steps] == [(m["loss"], m["sent_bytes"]) for m in moved]
        layers = [layer for each in told if each["event"] == "quality" for layer in each["layers"].values()]
        assert bool(layers) == (rank == 0)
        assert all(0 < layer["error"] < 1 for layer in layers)
        assert any(each["event"] == "validation" and each["step"] == 25 for each in told)


@pytest.mark.full
def test_steps_that_ddp_reduces_itself_are_told_with_their_own_losses(tmp_path: Path) -> None:
    settings = {"task": "digits", "codec": "dense", "steps": 8, "run_folder": str(tmp_path)}
    moved = [e for e in run_workers("gradwire.tasks.worker", settings, 2) if e["event"] == "step"]
    told = records(tmp_path / "rank-0.jsonl")
    steps = [each for each in told if each["event"] == "step"]
    assert [(s["loss"], s["sent"]) for s in steps] == [(m["loss"], m["sent_bytes"]) for m in moved]
    assert [each["step"] for each in steps] == list(range(1, 9))
    layout = [each for each in told if each["event"] == "layout"][-1]["buckets"]
    assert sum(bucket["numel"] for bucket in layout) == 2_030_058
    for each in steps[2:]:
        assert each["sent"] == each["dense"] > 0
        assert all(b["codec"] == "dense" and b["ready_s"] < b["done_s"] <= each["seconds"] for b in each["buckets"])


@pytest.mark.full
def test_auto_tells_its_plans_and_reasons(tmp_path: Path) -> None:
    settings = {"task": "digits", "codec": "auto", "steps": 40, "run_folder": str(tmp_path)}
    assert list(run_workers("gradwire.tasks.worker", settings, 2))
    told = records(tmp_path / "rank-0.jsonl")
    assert any("the first plan" in each["what"] for each in told if each["event"] == "note")
    plan = next(each for each in told if each["event"] == "plan")
    assert plan["alternatives"]["dense"] > 0  # the only one, if there is nothing to gain
    assert plan["predicted_s"] > 0
    assert plan["buckets"][0]["method"]
    assert plan["reason"]
    assert not [each for each in records(tmp_path / "rank-1.jsonl") if each["event"] == "plan"]


@pytest.mark.full
def test_a_worker_that_is_killed_leaves_whole_lines(tmp_path: Path) -> None:
    settings = {"task": "digits", "codec": "int4", "steps": 2000, "run_folder": str(tmp_path)}
    training = run_workers("gradwire.tasks.worker", settings, 2)
    for event in training:
        if event.get("step") == 12:
            break
    file = tmp_path / "rank-1.jsonl"
    os.kill(_children()[1], signal.SIGKILL)
    with pytest.raises(gradwire.PeerError):
        list(training)
    whole = file.read_text().rpartition("\n")[0].splitlines()
    assert len([1 for line in whole if json.loads(line)["event"] == "step"]) >= 5


def _children() -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=True
    ).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "gradwire.tasks.worker" in line]


@pytest.mark.full
def test_a_sharded_optimizer_tells_its_steps(tmp_path: Path) -> None:
    settings = {"task": "digits", "ratio": 0.2, "steps": 4, "run_folder": str(tmp_path)}
    assert list(run_workers("gradwire.tasks.worker", settings, 2))
    told = records(tmp_path / "rank-1.jsonl")
    assert told[0]["codec"] == "sharded 0.2"
    steps = [each for each in told if each["event"] == "step"]
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    assert all(0 < each["sent"] < 0.25 * each["dense"] for each in steps)


PROGRAM = """
import sys, torch, torch.distributed as dist, gradwire
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64))
compression = gradwire.compress(model, "int4")
for step in range(3):
    loss = model(torch.ones(1, 128)).square().mean()
    loss.backward()
    compression.observe_loss(loss.item())
compression.close()
dist.destroy_process_group()
"""


def test_the_environment_names_a_folder_and_programs_stay_as_they_are(tmp_path: Path) -> None:
    environment = os.environ | {"GRADWIRE_RUN_DIR": str(tmp_path / "run")}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=120)
    told = records(tmp_path / "run" / "rank-0.jsonl")
    events = [each["event"] for each in told if each["event"] != "layout"]
    assert events == ["start", "step", "step", "step", "done"]
    assert all(each["loss"] > 0 for each in told if each["event"] == "step")


ENDINGS = [
    ("compression.close()", "done", ""),
    ("", "done", ""),  # without close(), and without an error
    ("raise ValueError('a bad day')", "failed", "ValueError: a bad day"),
]


@pytest.mark.full
@pytest.mark.parametrize(("ending", "status", "what"), ENDINGS)
def test_how_a_program_ended(ending: str, status: str, what: str, tmp_path: Path) -> None:
    program = PROGRAM.replace('"int4"', '"int4", telemetry=gradwire.Telemetry(sys.argv[1])')
    program = program.replace("loss.item()", "loss.detach()").replace("compression.close()", ending)
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=120, capture_output=True)
    told = records(tmp_path / "rank-0.jsonl")
    assert (told[-1]["event"], told[-1]["status"], told[-1]["what"]) == ("done", status, what)
    losses = [each["loss"] for each in told if each["event"] == "step"]
    assert len(losses) >= 2
    assert all(isinstance(loss, float) for loss in losses)


def _two_ranks(telemetry: list[Telemetry], what: str, gradients: list[list[torch.Tensor]], **options: Any) -> None:
    """Two ranks of threads reduce the gradients of each step, watched."""

    def play(peers: Loopback) -> None:
        layer = nn.Linear(128, 64)
        reducer = GradientReducer(dict(layer.named_parameters()), what, peers, **options)
        watch = Watch(reducer, telemetry[peers.rank])
        for step in gradients:
            layer.weight.grad, layer.bias.grad = step[peers.rank].clone(), torch.ones(64)
            reducer.reduce()
            telemetry[peers.rank].flush()
        watch.settle()
        telemetry[peers.rank].close()
        reducer.close()

    threads = [threading.Thread(target=play, args=(peers,)) for peers in Loopback.ranks(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_error_is_that_of_the_gradient_and_the_residual_what_is_kept_back() -> None:
    memories = [Memory(), Memory()]
    telemetry = [Telemetry(memory, quality_every=1) for memory in memories]
    spike = torch.zeros(64, 128)
    spike.view(-1)[:164] = torch.linspace(1, 2, 164)  # twice what topk keeps
    _two_ranks(telemetry, "topk:0.01", [[spike, spike]] * 6)
    found = [each["layers"]["weight"] for each in memories[0].records if each["event"] == "quality"]
    kept = torch.linspace(1, 2, 164)[82:].square().sum() / torch.linspace(1, 2, 164).square().sum()
    assert found[0]["error"] == pytest.approx(1 - float(kept), rel=0.02)
    assert found[0]["residual"] is None
    assert found[-1]["residual"] > 0.5


@pytest.mark.parametrize("every", [2, 3, 4])
def test_losses_are_looked_at_every_so_many_steps(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.adapters.watch._SHARE", math.inf)  # looks may take all of the time
    memories = [Memory(), Memory()]
    telemetry = [Telemetry(memory, quality_every=every) for memory in memories]
    _two_ranks(telemetry, "int4", [[torch.ones(64, 128)] * 2] * 13)
    looked = [each["step"] for each in memories[0].records if each["event"] == "quality"]
    assert looked == list(range(1, 14, every))


def test_a_step_that_is_not_taken_is_a_note() -> None:
    memories = [Memory(), Memory()]
    bad = torch.full((64, 128), torch.nan)
    good = torch.ones(64, 128)
    _two_ranks(
        [Telemetry(memory) for memory in memories],
        "int8",
        [[good, good], [good, bad], [good, good]],
        nonfinite="propagate",
    )
    for memory in memories:
        events = [each["event"] for each in memory.records if each["event"] in ("step", "note")]
        assert events == ["step", "note", "step"]


class Broken(Memory):
    def write(self, record: Any) -> None:
        super().write(record)
        raise OSError("no space left on device")


def test_a_sink_that_fails_is_named_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Broken(), Memory()
    with caplog.at_level(logging.WARNING), Telemetry(broken, good) as telemetry:
        telemetry.start(rank=0, ranks=1)
        for step in range(5):
            telemetry.step(step)
    assert len(broken.records) == 1
    assert len(good.records) == 7
    assert "Broken" in caplog.text
    assert "no space left" in caplog.text


def test_flush_waits_until_the_sinks_have_every_record() -> None:
    class Slow(Memory):
        flushed = 0

        def write(self, record: Any) -> None:
            time.sleep(0.05)
            super().write(record)

        def flush(self) -> None:
            self.flushed = len(self.records)

    slow = Slow()
    with Telemetry(slow) as telemetry:
        telemetry.start(rank=0, ranks=1)
        for step in range(3):
            telemetry.step(step)
        telemetry.flush()
        assert (len(slow.records), slow.flushed) == (4, 4)


def test_a_training_that_fails_says_so() -> None:
    memory = Memory()
    telemetry = Telemetry(memory)
    telemetry.start(rank=0, ranks=1)
    with pytest.raises(ZeroDivisionError), telemetry:
        1 / 0  # noqa: B018
    assert memory.records[-1]["status"] == "failed"
    assert "ZeroDivisionError" in memory.records[-1]["what"]


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quality_every"):
        Telemetry(quality_every=-1)
    with pytest.raises(ConfigError, match="sink"):
        Telemetry(3)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Telemetry(tmp_path / "file").start(rank=0, ranks=1)
    telemetry = Telemetry(Memory())
    telemetry.start(rank=0, ranks=1)
    with pytest.raises(ConfigError, match="belongs to a training already"):
        telemetry.start(rank=0, ranks=1)
    telemetry.close()
    with pytest.raises(ConfigError, match="close"):
        telemetry.start(rank=0, ranks=1)
    for address in ("9464", 9464):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            Prometheus(address)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`most`"):
        Memory(most=0)
    with pytest.raises(ConfigError, match="`step`"):
        Telemetry().step("1")  # type: ignore[arg-type]
    for loss in ("0.5", torch.ones(2), [1.0]):
        with pytest.raises(ConfigError, match="`loss` must be a number"):
            Telemetry().step(1, loss=loss)  # type: ignore[arg-type]
    for what in ("", False, 3):
        with pytest.raises(ConfigError, match="`telemetry`"):
            Telemetry.of(what)  # type: ignore[arg-type]


def test_what_json_cannot_hold_does_not_end_the_file(tmp_path: Path) -> None:
    with Telemetry(tmp_path) as telemetry:
        telemetry.start(rank=0, ranks=1, settings={"where": tmp_path, 3: torch.tensor(0.5), "all": (1, float("inf"))})
        telemetry.step(1, loss=torch.tensor(0.25))  # type: ignore[arg-type]
    told = records(tmp_path / "rank-0.jsonl")
    assert told[0]["settings"] == {"where": str(tmp_path), "3": 0.5, "all": [1, None]}
    assert [each.get("loss") for each in told] == [None, 0.25, None]


def test_only_rank_0_has_trackers(tmp_path: Path) -> None:
    from gradwire.telemetry import TensorBoard

    with Telemetry(TensorBoard(tmp_path)) as telemetry:
        telemetry.start(rank=1, ranks=2)
        telemetry.step(1, loss=0.5)
    assert not list(tmp_path.iterdir())


def test_prometheus_reads_the_page() -> None:
    sink = Prometheus("127.0.0.1:0")
    with Telemetry(sink) as telemetry:
        telemetry.start(rank=0, ranks=2)
        telemetry.step(7, loss=0.25, sent=100, received=90, dense=800, seconds=0.05)
        telemetry.record("quality", step=7, layers={'a"b\n': {"error": 0.5, "residual": None}})
        telemetry.record("drop", step=7, rank=1, what="dropped")
        telemetry.flush()
        with urllib.request.urlopen(f"http://{sink.address}/metrics", timeout=10) as page:
            text = page.read().decode()
    for line in (
        'gradwire_loss{rank="0"} 0.25',
        'gradwire_step{rank="0"} 7',
        'gradwire_time_step_s{rank="0"} 0.05',
        'gradwire_sent_bytes_total{rank="0"} 100',
        'gradwire_bytes_ratio{rank="0"} 0.125',
        'gradwire_dropped_total{rank="0"} 1',
        r'gradwire_error{rank="0",layer="a\"b\n"} 0.5',
    ):
        assert line in text.splitlines()
    assert all(line.startswith(("#", "gradwire_")) for line in text.splitlines())


def test_records_of_a_restart_are_appended(tmp_path: Path) -> None:
    for start in (1, 3):
        with Telemetry(JsonLines(tmp_path)) as telemetry:
            telemetry.start(rank=0, ranks=1)
            for step in (start, start + 1):
                telemetry.step(step)
    told = records(tmp_path / "rank-0.jsonl")
    assert [each["event"] for each in told] == ["start", "step", "step", "done"] * 2
