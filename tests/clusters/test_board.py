"""What ranks leave with the program that has started them."""

import pytest
import torch

from gradwire import CheckpointError
from gradwire.clusters.board import Board
from gradwire.collectives.loopback import Alone


class Kept:
    """A training of one rank, of so many megabytes."""

    peers = Alone()

    def __init__(self, steps, megabytes=0.0):
        self.steps, self.tensor = steps, torch.randn(int(megabytes * 250_000) + 3)

    def state_dict(self):
        return {"steps": self.steps, "tensor": self.tensor}

    def load_state_dict(self, states):
        (state,) = states
        self.steps, self.tensor = state["steps"], state["tensor"]


def test_the_last_checkpoint_comes_back_and_older_ones_are_forgotten():
    board = Board.open("127.0.0.1")
    rank, again = Board.reach(*board.address), Kept(0)
    assert not rank.restore(again)
    for steps, megabytes in ((1, 0), (5, 20), (9, 9)):  # more than the store takes at once
        kept = Kept(steps, megabytes)
        rank.save(kept)
        rank.save(kept)
        assert Board.reach(*board.address).restore(again)
        assert again.steps == steps
        assert torch.equal(again.tensor, kept.tensor)
    assert board.store.num_keys() < 10


def test_what_is_damaged_is_not_taken_for_a_checkpoint():
    board = Board.open("127.0.0.1")
    board.save(Kept(3))
    board.store.set("checkpoint/3/1/0/0", b"something else")
    with pytest.raises(CheckpointError, match="what rank 0 left at step 3 is damaged"):
        board.restore(Kept(0))


def test_all_that_is_said_is_heard_once_and_in_order():
    board = Board.open("127.0.0.1")
    rank = Board.reach(*board.address)
    for number in range(20):
        rank.say({"step": number})
    assert [each["step"] for each in board.heard()] == list(range(20))
    rank.say({"step": 20})
    assert [each["step"] for each in board.heard()] == [20]
    assert list(board.heard()) == []
