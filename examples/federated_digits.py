"""Eight workers of unequal speed train one digits classifier, asynchronously, through a coordinator.

A server process holds the model and its optimizer. Six workers of normal speed and two that take five times as long
for a step, each with its own share of the images, read the parameters, compute a gradient and push it, all at their
own pace; gradients and parameters travel in int8. A push that is more than `--staleness` versions old is refused. One
worker is killed in the middle of it (SIGKILL), and started again under the same name.

    python examples/federated_digits.py
    python examples/federated_digits.py --staleness none          # every push counts, however old it is
    python examples/federated_digits.py --kill-server             # that, too: it goes on from what it has on the disk
    python examples/federated_digits.py --plot staleness.png      # both, one after the other, and a picture

Needs: pip install 'gradwire[serve,bench]'
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

import gradwire
from gradwire.tasks import TASKS

IMAGES = (60, 90, 120, 150, 180, 210, 287, 340)  # of each worker: together the 1,437 for training
SLOW = (3, 6)  # these workers take SLOWNESS times as long for a step
SLOWNESS = 5
KILLED = 1  # this one is killed after so many pushes, and started again
KILLED_AFTER = 5
BATCH = 32

SETTINGS = """
address = "{address}"

[model]
optimizer = "SGD"
options = {{ lr = 0.005, momentum = 0.5 }}

[staleness]
{bound}

[durability]
folder = {folder}
fsync = "interval"
"""


# A worker: a process of its own, which could as well run on another machine.


def work(number, address, pipe):
    """Train on our images until the pipe says that it is enough; say for every push whether it was accepted."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends us
    torch.set_num_threads(1)
    torch.manual_seed(os.getpid())
    task = TASKS["digits"]()
    model = task.model()
    with contextlib.suppress(EOFError, OSError):  # the main process has ended: so do we
        pipe.send("ready")
        data = pipe.recv()
        if data == "stop":
            return
        images, labels = map(torch.from_numpy, data)
        pause = 0.0  # that makes a worker slow

        def loss():
            pick = torch.randint(len(labels), (BATCH,))
            time.sleep(pause)
            return task.loss(model, images[pick], labels[pick])

        with gradwire.CoordinatorClient(address, codec="int8", weights="int8", worker=f"worker-{number}") as client:
            while not pipe.poll():
                began = time.monotonic()
                pushed = client.compute_and_push(model, loss)
                if number in SLOW:
                    pause = (SLOWNESS - 1) * (time.monotonic() - began - pause)
                pipe.send(pushed.accepted)


class Worker:
    """A worker as the main process sees it: its process, the pipe to it, and what became of its pushes."""

    def __init__(self, number, address, data):
        self.number, self.address, self.data = number, address, data
        self.accepted = self.refused = self.starts = 0
        self.start()

    def start(self):
        """Begin, or begin again, in a new process."""
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(self.number, self.address, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.starts += 1

    def go(self):
        """Let it begin, with its images."""
        self.pipe.send(self.data)

    def hear(self):
        """Take what it has said since the last time."""
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                said = self.pipe.recv()
                if said == "ready":  # it was started again
                    self.go()
                elif said:
                    self.accepted += 1
                else:
                    self.refused += 1

    def kill_and_start_again(self):
        """As if its machine had lost power."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.hear()
        self.pipe.close()
        self.start()

    def stop(self):
        """Tell it that it is enough."""
        with contextlib.suppress(OSError):
            self.pipe.send("stop")

    def end(self, wait):
        """Wait for its end, so many seconds at most."""
        self.process.join(max(0.0, wait))
        self.hear()
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


# The server: `gradwire serve` with a file of settings, started again if it ends.


class Server:
    """A server in a process of its own, kept alive as a service manager would; a context manager."""

    def __init__(self, bound):
        self.bound = "" if bound is None else f"bound = {bound}"
        self.folder = tempfile.TemporaryDirectory()
        self.address, self.ending = "127.0.0.1:0", False

    def start(self):
        """Begin to serve; again, at the address it had."""
        file = Path(self.folder.name) / "serve.toml"
        kept = json.dumps(str(Path(self.folder.name) / "model"))
        file.write_text(SETTINGS.format(address=self.address, folder=kept, bound=self.bound))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gradwire", "serve", "--config", str(file)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        first = self.process.stdout.readline()  # serving at 127.0.0.1:12345, kept in ...
        if not first.startswith("serving at "):
            raise RuntimeError(f"the server did not start: {first}")
        self.address = first.split()[2].rstrip(",")

    def watch(self):
        """Start it whenever it has ended, until that is what we want."""
        while True:
            status = self.process.wait()
            if self.ending:
                return
            print(f"the server ended with status {status}: started again", flush=True)
            self.start()

    def __enter__(self):
        self.start()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        self.watcher.start()
        return self

    def __exit__(self, *error):
        self.ending = True
        while self.watcher.is_alive():  # it may be starting another one at this moment
            self.process.terminate()
            self.watcher.join(0.2)
        self.folder.cleanup()


# The main process: starts everything, and looks at the model once a second.


def shares():
    """Images and labels of every worker."""
    whole = TASKS["digits"](batch_size=sum(IMAGES)).batch(0, rank=0, ranks=1)
    return list(zip(*([part.numpy() for part in each.split(IMAGES)] for each in whole), strict=True))


def train(bound, target, limit, kill_server=False):
    """One training: the points of its curve, which are seconds, pushes applied, test accuracy; and pushes refused."""
    task = TASKS["digits"]()
    model = task.model()
    curve = [(0.0, 0, task.validate(model).accuracy)]
    with Server(bound) as server, gradwire.CoordinatorClient(server.address) as client:
        print(f"\nserver at {server.address}, staleness bound {'none' if bound is None else bound}")
        print(f"test accuracy at the start {curve[0][2]:.4f}", flush=True)
        client.set_model_parameters(dict(model.named_parameters()), only_if_empty=True)
        workers = [Worker(number, server.address, data) for number, data in enumerate(shares())]
        try:
            for worker in workers:
                worker.pipe.recv()  # it is ready
            for worker in workers:
                worker.go()
            began = time.monotonic()
            while curve[-1][2] < target and curve[-1][0] < limit:
                time.sleep(max(0.0, curve[-1][0] + 1.0 - (time.monotonic() - began)))
                version = client.load_into(model)
                seconds = time.monotonic() - began
                accuracy = task.validate(model).accuracy
                curve.append((seconds, version, accuracy))
                print(f"{seconds:6.1f} s   version {version:5}   test accuracy {accuracy:.4f}", flush=True)
                for worker in workers:
                    worker.hear()
                if workers[KILLED].starts == 1 and workers[KILLED].accepted >= KILLED_AFTER:
                    workers[KILLED].kill_and_start_again()
                    print(f"worker-{KILLED} killed, and started again", flush=True)
                elif kill_server and workers[KILLED].starts == 2:
                    server.process.kill()
                    kill_server = False
        finally:
            for worker in workers:
                worker.stop()
            late = time.monotonic() + 10
            for worker in workers:
                worker.end(late - time.monotonic())
        status = client.status()[0]
    show(workers, status, curve)
    return curve, sum(worker.refused for worker in workers)


def show(workers, status, curve):
    """What every worker has done, and what that made."""
    print("\nworker     images  speed  starts  accepted  refused as stale")
    for worker in workers:
        speed = f"1/{SLOWNESS}" if worker.number in SLOW else "1"
        told = f"{worker.starts:>6}  {worker.accepted:>8}  {worker.refused:>16}"
        print(f"worker-{worker.number}   {IMAGES[worker.number]:>6}  {speed:>5}  {told}")
    ages = dict(status.ages)
    mean = sum(age * number for age, number in ages.items()) / max(1, sum(ages.values()))
    print(f"applied {status.version} pushes, refused {sum(worker.refused for worker in workers)}")
    print(f"those applied were {mean:.1f} versions old on average, at most {max(ages, default=0)}")
    print(f"received {status.bytes_received / 1e6:.0f} MB, sent {status.bytes_sent / 1e6:.0f} MB")
    print(f"final test accuracy {curve[-1][2]:.4f} after {curve[-1][0]:.1f} s and {curve[-1][1]} pushes", flush=True)


def plot(file, curves, target):
    """Test accuracy, against time and against pushes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, place, label in zip(panels, (0, 1), ("seconds", "pushes applied"), strict=True):
        for name, curve in curves.items():
            xs, ys = [point[place] for point in curve], [100 * point[2] for point in curve]
            panel.plot(xs, ys, label=name, marker="o", markersize=3)
        panel.axhline(100 * target, color="gray", linestyle=":", label=f"target, {target:.0%}")
        panel.set_xlabel(label)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend()
    figure.suptitle(
        "Asynchronous training of the digits CNN: six workers, and two that take five times as long for a step"
    )
    figure.savefig(file, dpi=150)
    print(f"\ndrawn: {file}")


def main():
    """Read the options, train, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="16", metavar="N|none", help="how many versions old a push may be")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy at which it ends")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which it ends anyway")
    parser.add_argument("--kill-server", action="store_true", help="kill the server, too, in the middle of it")
    parser.add_argument("--plot", metavar="FILE.png", help="train with the bound and without, and draw both")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended on the way out
    torch.set_num_threads(1)
    bound = None if given.staleness == "none" else int(given.staleness)
    if given.plot is not None and bound is None:
        parser.error("--plot draws a bound beside none: give --staleness a number")
    if given.plot is not None and given.kill_server:
        parser.error("--plot compares two undisturbed servers: leave out --kill-server")
    if given.plot is None:
        train(bound, given.target, given.limit, given.kill_server)
        return
    curves = {}
    for each, name in ((bound, f"bound of {bound} versions"), (None, "no bound")):
        curve, refused = train(each, given.target, given.limit)
        curves[f"{name}: {refused} pushes refused"] = curve
    plot(given.plot, curves, given.target)


if __name__ == "__main__":
    main()
