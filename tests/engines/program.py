"""An example that runs as a user runs it, and what it prints."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LOOPBACK = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",
}
_STEP = re.compile(r"""["']step["']: (\d+), ["']loss["']: ([\d.]+)(?:, ["']ranks["']: (\d+))?""")
_BEGAN = re.compile(r"""["']began["']: (\d+)""")
_ACCURACY = re.compile(r"""["']accuracy["']: ([\d.]+)""")


class Program:
    """A process, and its losses by step as they come; those of a step that was taken again are the last ones."""

    def __init__(self, command, env=None, start=subprocess.Popen):
        self.losses, self.ranks, self.printed, self.accuracy, self.began = {}, {}, [], None, []
        self.process = start(
            command,
            env={**os.environ, **LOOPBACK, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.printed.append(line)
            if "TrainingReport" in line:  # Ray's log of what every rank told it
                continue
            for step, loss, ranks in _STEP.findall(line):
                self.losses[int(step)] = float(loss)
                self.ranks[int(step)] = int(ranks or 0)
            self.began += map(int, _BEGAN.findall(line))  # the steps that were taken when it, or it again, began
            for accuracy in _ACCURACY.findall(line):
                self.accuracy = float(accuracy)

    def text(self):
        return "".join(self.printed[-80:])

    def wait_for_step(self, step, timeout_s=120):
        end = time.monotonic() + timeout_s
        while max(self.losses, default=0) < step:
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.text()}"
            assert time.monotonic() < end, f"step {step} was not reached\n{self.text()}"
            time.sleep(0.02)

    def finish(self, timeout_s=240):
        """Wait for a good end."""
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.text()}") from None
        self._reader.join()
        assert status == 0, f"ended with {status}\n{self.text()}"
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(10)
        self.process.stdout.close()


def example(name, *options, env=None):
    return Program([sys.executable, str(EXAMPLES / name), *map(str, options)], env)


def torchrun(name, *options, agent=("--standalone", "--nproc-per-node", "2"), env=None, start=subprocess.Popen):
    command = [sys.executable, "-m", "torch.distributed.run", *agent, str(EXAMPLES / name), *map(str, options)]
    return Program(command, env, start)


def assert_went_on(program, undisturbed, steps, least):
    """It was started again, from a checkpoint of at least so many steps, and ended as the undisturbed one did."""
    first, again = program.began
    assert first == 0
    assert again >= least
    assert sorted(program.losses) == list(range(1, steps + 1))
    assert abs(program.losses[steps] - undisturbed.losses[steps]) <= 0.3
    assert abs(program.accuracy - undisturbed.accuracy) <= 0.05


def processes(pattern, root=None):
    """Ids of processes whose command line has a pattern; below a process, if one is given."""
    found, parents = [], {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if re.search(pattern, words):
                    found.append(int(entry.name))

    def below(pid):
        while pid and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return [pid for pid in sorted(found) if root is None or below(pid)]
