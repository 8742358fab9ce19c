"""kill -9 of the server, again and again, under load: nothing acknowledged is lost, nothing is applied twice.

``GRADWIRE_KILLS=200`` for as many kills as the documentation speaks of.
"""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from gradwire import CoordinatorClient
from gradwire.coordinator.rules import Model
from gradwire.coordinator.store import Store
from tests.case import tiered

KILLS = int(os.environ.get("GRADWIRE_KILLS", "20"))
ROOT = Path(__file__).parent.parent.parent
SHAPES = {"w": (40, 50), "b": (40,)}


def gradient(worker, number):
    """Whole numbers: their sums are exact, in any order."""
    generator = torch.Generator().manual_seed(1_000_000 * worker + number)
    return {name: torch.randint(-8, 9, shape, generator=generator).float() for name, shape in SHAPES.items()}


class Load:
    """Eight workers that push, each in its own thread, and count what was acknowledged."""

    def __init__(self, address):
        self.acknowledged = [0] * 8
        self.errors = []
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self.work, args=(address, each)) for each in range(8)]
        for thread in self.threads:
            thread.start()

    def work(self, address, worker):
        try:
            with CoordinatorClient(address, codec="none", worker=f"worker-{worker}", window=1 + worker % 3) as client:
                while not self.done.is_set():
                    client.add_gradients(gradient(worker, self.acknowledged[worker] + 1))
                    self.acknowledged[worker] += 1
        except Exception as error:
            self.errors.append(error)

    def stop(self):
        self.done.set()
        for thread in self.threads:
            thread.join()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.timeout(60 + 3 * KILLS)
@pytest.mark.parametrize("kills", tiered([3, KILLS], first=[3]))
def test_no_acknowledged_push_is_lost_and_none_is_applied_twice(tmp_path, kills):
    address, folder = f"127.0.0.1:{free_port()}", tmp_path / "store"
    (tmp_path / "serve.toml").write_text(
        f'address = "{address}"\n[durability]\nfolder = "{folder}"\nsnapshot_every = 50\n'
    )
    command = [sys.executable, "-m", "tests.workers.nursery", str(tmp_path / "serve.toml")]
    draw = random.Random(6)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as nursery:
        try:
            server = int(nursery.stdout.readline())
            with CoordinatorClient(address) as client:
                client.set_model_parameters({name: torch.zeros(shape) for name, shape in SHAPES.items()})
            load = Load(address)
            for _ in range(kills):
                time.sleep(draw.uniform(0.02, 0.4))
                os.kill(server, signal.SIGKILL)
                server = int(nursery.stdout.readline())
            time.sleep(0.5)
            load.stop()
            assert not load.errors
            with CoordinatorClient(address) as client:
                version, found = client.read()
        finally:
            nursery.kill()
            os.kill(server, signal.SIGKILL)
    expected = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for worker, count in enumerate(load.acknowledged):
        for number in range(1, count + 1):
            for name, tensor in gradient(worker, number).items():
                expected[name] -= tensor
    assert version == sum(load.acknowledged) > kills
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
    shutil.copytree(folder, tmp_path / "copy")
    with Store(tmp_path / "copy", Model) as replayed:
        assert replayed.read()[0] == version
        assert all(torch.equal(replayed.read()[1][name], expected[name]) for name in SHAPES)
    print(f"{kills} kills, {version} pushes acknowledged, by worker {load.acknowledged}")
