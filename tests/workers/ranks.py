"""What ranks of a module of cases said."""

import json
import time
from pathlib import Path

from gradwire.collectives.rank import RENDEZVOUS
from tests.workers import warm


def said(folder, cases, ranks, module="tests.workers.ddp"):
    """By the name of a case, what each rank said of it; one process group serves all cases."""
    folder, numbered = Path(folder), list(cases.values())
    (folder / "rendezvous").unlink(missing_ok=True)
    settings = json.dumps({"folder": str(folder), "cases": numbered})
    processes = [
        warm.start(
            module,
            settings,
            stderr=folder / f"stderr-{rank}",
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                RENDEZVOUS: str(folder / "rendezvous"),
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
        )
        for rank in range(ranks)
    ]
    try:
        while any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes):
            time.sleep(0.01)
    finally:
        for process in processes:
            process.join(5 if any(each.exitcode for each in processes) else None)
            process.kill()
            process.join()
    failed = {rank: (folder / f"stderr-{rank}").read_text() for rank in range(ranks) if processes[rank].exitcode}
    assert not failed, failed
    lines = [[json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()] for rank in range(ranks)]
    return {name: [dict(rank)[i] for rank in lines] for i, name in enumerate(cases)}


class Answers:
    """What ranks said of the cases of several groups; a group is started when one of its cases is first asked for.

    So tests that are left out cost no process, and those that are not share as few as before.
    """

    def __init__(self, make_folder, ranks, module="tests.workers.ddp", **groups):
        self.make_folder, self.ranks, self.module, self.groups = make_folder, ranks, module, groups
        self.known = {}

    def __getitem__(self, case):
        if case not in self.known:
            name = next(name for name, cases in self.groups.items() if case in cases)
            self.known |= said(self.make_folder(name), self.groups[name], self.ranks, self.module)
        return self.known[case]


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
