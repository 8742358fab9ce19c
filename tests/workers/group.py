"""Groups of ranks that come and go quickly, and may be stopped and killed."""

import time

from tests.workers import warm

STARTUP_S = 60


class Group:
    """Ranks in training: ``live(folder, rank, ranks, settings)`` is what each does."""

    def __init__(self, live, folder, ranks=4, **settings):
        folder.mkdir(exist_ok=True)
        settings = {"codec": "int4", "timeout_s": 20, **settings}
        self.folder, self.size = folder, ranks
        self.ranks = [
            warm.CONTEXT.Process(target=live, args=(str(folder), rank, ranks, settings)) for rank in range(ranks)
        ]

    def __enter__(self):
        for rank in self.ranks:
            rank.start()
        self.wait_for("training", range(self.size), STARTUP_S)
        return self

    def __exit__(self, *error):
        for rank in self.ranks:
            rank.kill()
            rank.join()

    def wait_for(self, what, ranks, timeout_s):
        end = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if not (self.folder / f"{what}-{rank}").exists()]:
            said = {rank: self.said(rank) for rank in range(self.size)}
            ended = [rank for rank in missing if self.ranks[rank].exitcode and what == "training"]
            assert not ended, f"ranks {ended} never trained: {said}"
            assert time.monotonic() < end, f"{what!r} is missing from ranks {missing} after {timeout_s} s: {said}"
            time.sleep(0.01)

    def said(self, rank):
        for name in ("said", "stderr"):
            file = self.folder / f"{name}-{rank}"
            if file.exists() and file.read_text():
                return file.read_text()
        return "nothing"

    def survivors_of(self, victim, timeout_s):
        """What they said."""
        survivors = [rank for rank in range(self.size) if rank != victim]
        self.wait_for("said", survivors, timeout_s)
        return [self.said(rank) for rank in survivors]
