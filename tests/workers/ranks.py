"""What ranks of a module of cases said."""

import json
from pathlib import Path

from gradwire.clusters import run_workers


def said(folder, cases, ranks, module="tests.workers.ddp"):
    """By the name of a case, what each rank said of it; one process group serves all cases."""
    numbered = list(cases.values())
    for _ in run_workers(module, {"folder": str(folder), "cases": numbered}, ranks):
        pass
    lines = [[json.loads(line) for line in (Path(folder) / f"rank-{r}").read_text().splitlines()] for r in range(ranks)]
    return {name: [dict(rank)[i] for rank in lines] for i, name in enumerate(cases)}


def without_error(answers):
    """The answers of all ranks, none of them an error."""
    for rank, answer in enumerate(answers):
        assert "error" not in answer, f"rank {rank}: {answer['error']}"
    return answers


def same_on_every_rank(answers, *names):
    """The answers, in which those fields have one value."""
    for name in names or ("parameters",):
        assert len({str(answer[name]) for answer in without_error(answers)}) == 1, [a[name] for a in answers]
    return answers
