"""Folders of runs, written as a training would."""

import json
import os
from pathlib import Path

BEGIN = 1_700_000_000.0


def append(folder: Path, file: str, *records: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / file).open("a") as lines:
        lines.writelines(json.dumps(record) + "\n" for record in records)


def start(rank=0, ranks=1, **facts):
    known = {"codec": "int4", "parameters": 1000, "gradwire": "0.1", "torch": "2", "host": "a", "pid": 1, "steps": None}
    return (
        {"event": "start", "time": BEGIN, "rank": rank, "ranks": ranks, "settings": {"task": "digits"}} | known | facts
    )


def step(number, loss=None, **facts):
    """The step takes 0.1 s and sends 1 MB, of 8 MB."""
    buckets = [
        {"codec": "int4", "sent": 6e5, "received": 6e5, "dense": 5e6, "encode_s": 0.001, "wire_s": 0.01}
        | {"decode_s": 0.001, "ready_s": 0.04, "done_s": 0.07},
        {"codec": "none", "sent": 4e5, "received": 4e5, "dense": 3e6, "encode_s": 0.0, "wire_s": 0.02}
        | {"decode_s": 0.0, "ready_s": 0.06, "done_s": 0.1},
    ]
    known = {"seconds": 0.1, "compute_s": 0.06, "exposed_s": 0.04, "encode_s": 0.001, "wire_s": 0.03, "decode_s": 0.001}
    told = {"sent": 1_000_000, "received": 1_000_000, "dense": 8_000_000, "buckets": buckets}
    value = 2.0 / number if loss is None else loss
    return {"event": "step", "time": BEGIN + 0.1 * number, "step": number, "loss": value} | known | told | facts


def quality(number, **layers):
    named = {name: {"codec": "int4", "error": error, "residual": 0.5} for name, error in layers.items()}
    return {"event": "quality", "time": BEGIN + 0.1 * number, "step": number, "layers": named}


def note(number, what):
    return {"event": "note", "time": BEGIN + 0.1 * number, "step": number, "what": what}


def plan(number, **facts):
    bucket = {"parameters": 3, "dense_bytes": 5e6, "sent_bytes": 6e5, "method": "int4", "ready_s": 0.0}
    known = {"name": "mixed", "reason": "the link is slow", "predicted_s": 0.1, "measured_s": None, "computing_s": 0.06}
    told = {"alternatives": {"none": 0.5}, "buckets": [bucket | {"predicted_s": 0.1, "measured_s": None}]}
    return {"event": "plan", "time": BEGIN + 0.1 * number, "step": number} | known | told | facts


def validation(number, loss):
    return {"event": "validation", "time": BEGIN + 0.1 * number, "step": number, "loss": loss, "accuracy": 0.5}


def coordinator(second, **facts):
    known = {
        "version": second,
        "applied": 3 * second,
        "refused": 0,
        "queued": 2,
        "workers": 4,
        "received": 1,
        "sent": 1,
    }
    return {"event": "coordinator", "time": BEGIN + second, "staleness": {"0": 5, "2": 7}} | known | facts


def whole_run(folder: Path, steps=50, ranks=2, codec="int4", done=True, scale=1.0) -> Path:
    """A run with everything in it."""
    for rank in range(ranks):
        records = [start(rank, ranks, codec=codec, steps=steps)]
        records += [step(each, loss=scale * 2.0 / each) for each in range(1, steps + 1)]
        append(folder, f"rank-{rank}.jsonl", *records)
    names = {"head.weight": 0.1, "body.weight": 0.3, "tail.weight": 0.2}
    more = [quality(each, **names) for each in (10, 20)]
    append(folder, "rank-0.jsonl", *more, plan(5), note(5, "plan 'mixed' is used"), validation(steps, 0.125))
    append(folder, "rank-0.jsonl", {"event": "drop", "time": BEGIN, "step": 7, "rank": 1, "what": "stale"})
    append(folder, "coordinator.jsonl", *[coordinator(each) for each in range(5)])
    if done:
        for rank in range(ranks):
            append(folder, f"rank-{rank}.jsonl", {"event": "done", "time": BEGIN + 9, "status": "done", "what": ""})
    return folder


def many_steps(path: Path, steps: int) -> None:
    """A million of them in seconds: one text, with the numbers put in."""
    line = json.dumps(step(1)).replace('"step": 1,', '"step": %d,').replace('"loss": 2.0', '"loss": %.4f') + "\n"
    with path.open("w") as file:
        file.write(json.dumps(start(steps=steps)) + "\n")
        for begin in range(0, steps, 10_000):
            file.write(
                "".join(line % (i, 1000.0 / (i + 1000)) for i in range(begin + 1, min(begin + 10_000, steps) + 1))
            )


def hostile_runs(folder: Path, scale: float = 1.0) -> list[Path]:
    """Runs that want memory: tiny records, records that are large once read, ranks, layers and names without end."""

    def write(run, file, lines):
        (folder / run).mkdir(parents=True, exist_ok=True)
        with (folder / run / file).open("w") as out:
            out.writelines(line + "\n" for line in lines)

    def times(count):
        return range(max(1, int(scale * count)))

    for rank in range(4):
        write("tiny", f"rank-{rank}.jsonl", (f'{{"event":"step","step":{each}}}' for each in times(1_500_000)))
    write("tiny", "coordinator.jsonl", ('{"event":"coordinator"}' for _ in times(1_000_000)))
    large = "[" + "[]," * 95_000 + "[]]"
    for event in ("start", "done", "step", "layout", "plan", "validation", "note", "drop"):
        more = f'"event":"{event}","step":%d,"what":"x%d","x":{large},"buckets":{large}'
        write("large", f"rank-{len(event)}.jsonl", ("{" + more % (each, each) + "}" for each in times(30)))
    for rank in range(40):
        write("starts", f"rank-{rank}.jsonl", [f'{{"event":"start","settings":{large}}}'])
    for rank in times(20_000):
        write("ranks", f"rank-{rank}.jsonl", ['{"event":"step","step":1}'])
    for run in range(4):
        layers = {f"\U0001f600{'x' * 1900}{each}": {"codec": "y" * 1900, "error": 1, "residual": 1}
                  for each in times(500)}  # fmt: skip
        line = json.dumps({"event": "quality", "step": 0, "layers": layers}, ensure_ascii=False)
        write(f"layers {run}", "rank-0.jsonl", [line.replace('"step": 0', f'"step": {each}', 1) for each in range(4)])
        short = {f"{each}": {"error": 1, "residual": 1} for each in times(5000)}
        line = json.dumps({"event": "quality", "step": 0, "layers": short})
        write(f"layers {run}", "rank-1.jsonl", [line])
        write(f"history {run}", "rank-0.jsonl", (line.replace('"step": 0', f'"step": {n}', 1) for n in times(210)))
    notes = (f'{{"event":"note","step":{each},"what":"{each}{chr(0x1F600) * 1900}"}}' for each in times(600))
    write("notes", "rank-0.jsonl", list(notes))
    write("deep", "rank-0.jsonl", ['{"event":"start","x":' + "[" * 1_000_000, '{"event":' + "9" * 1_000_000 + "}"] * 4)
    write("deep", "rank-1.jsonl", ["x" * int(30e6 * scale)])
    os.mkfifo(folder / "deep" / "rank-2.jsonl")
    (folder / "deep" / "rank-3.jsonl").symlink_to("rank-3.jsonl")
    (folder / "deep" / "rank-4.jsonl").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder)
    (folder / "self").symlink_to("self")
    return sorted(folder.iterdir())
