"""A rank that fails while the other waits for it."""

import time

from gradwire.collectives import agree, connect

from .base import main


def body(settings, rank, ranks):
    peers = connect(timeout_s=30)
    agree(peers, "all is well")
    if rank == 1:
        time.sleep(0.5)
        raise ValueError("the real cause")
    agree(peers, "rank 1 never comes here")
    return ""


if __name__ == "__main__":
    main(body)
