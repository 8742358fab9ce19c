"""Ranks that run cases, and what they said of them."""

import contextlib
import json
import os
import time
from pathlib import Path

from gradwire.collectives.rank import RENDEZVOUS
from tests.workers import warm

END_S = 30  # what ranks may take to leave their group


class Cases:
    """Cases by name, run by real ranks as tests ask for them; one process group serves all.

    What a test is left out for costs nothing. ``cases[name]`` is what each rank said of a case: the value its function
    returned, or ``{"error": ...}``. A case is a function of the module ``tests.workers.X`` and its arguments.
    """

    def __init__(self, folder, cases, ranks, module="tests.workers.ddp"):
        self.folder, self.cases, self.ranks, self.module = Path(folder), cases, ranks, module
        self.known, self.processes, self.orders, self.answers = {}, [], [], []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for stream in (*self.orders, *self.answers):
            stream.close()  # the end of the orders ends the ranks
        end = time.monotonic() + END_S
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join()

    def __contains__(self, name):
        return name in self.cases

    def __getitem__(self, name):
        if name not in self.known:
            if not self.processes:
                self._start()
            function, arguments = self.cases[name]
            for order in self.orders:
                with contextlib.suppress(BrokenPipeError):  # who is gone is named below
                    print(json.dumps([function, arguments]), file=order, flush=True)
            self.known[name] = [self._answer(rank) for rank in range(self.ranks)]
        return self.known[name]

    def _start(self):
        for rank in range(self.ranks):
            orders = self.folder / f"orders-{rank}"
            os.mkfifo(orders)
            (self.folder / f"answers-{rank}").touch()
            self.processes.append(
                warm.start(
                    self.module,
                    str(self.folder / f"answers-{rank}"),
                    stdin=orders,
                    stderr=self.folder / f"stderr-{rank}",
                    environment={
                        "RANK": str(rank),
                        "WORLD_SIZE": str(self.ranks),
                        RENDEZVOUS: str(self.folder / "rendezvous"),
                        "GLOO_SOCKET_IFNAME": "lo",
                        "TORCH_CPP_LOG_LEVEL": "ERROR",
                    },
                )
            )
            # Both ways at once: to open one end of a pipe waits for the other.
            self.orders.append(os.fdopen(os.open(orders, os.O_RDWR), "w"))
            self.answers.append((self.folder / f"answers-{rank}").open())

    def _answer(self, rank):
        line = ""
        while not line.endswith("\n"):
            alive = self.processes[rank].is_alive()
            line += self.answers[rank].readline()
            if not line.endswith("\n"):
                assert alive, f"rank {rank} has ended: {(self.folder / f'stderr-{rank}').read_text()}"
                time.sleep(0.002)
        return json.loads(line)


def said(folder, cases, ranks, module="tests.workers.ddp"):
    """By the name of a case, what each rank said of it; the ranks have ended."""
    with Cases(folder, cases, ranks, module) as running:
        return {name: running[name] for name in cases}


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
