"""A parent that starts a server again whenever it is killed, by fork: a new one is there in a moment.

usage: python -m tests.workers.nursery SETTINGS_TOML; prints the process id of each server.
"""

import os
import sys

import torch

from gradwire.coordinator.server import Server
from gradwire.coordinator.settings import load_settings


def main():
    torch.set_num_threads(1)
    settings = load_settings(sys.argv[1])
    while True:
        child = os.fork()
        if not child:
            Server(settings).run(lambda server: print(os.getpid(), flush=True))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            sys.exit(f"the server ended by itself, with status {status}")


if __name__ == "__main__":
    main()
