"""A host that receives nothing any more: who is to blame is the same for all who still hear each other."""

import re
import sys
import time
from pathlib import Path

import pytest

from gradwire.lab import Lab

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def three(name):
    with Lab.up(3, None, name=name) as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_whose_inbound_traffic_is_cut_is_named_and_none_names_itself(three, tmp_path, victim):
    command = [sys.executable, "-m", "tests.workers.leaving", str(tmp_path), "int4", "5"]
    ranks = [three.popen(rank, command, cwd=Path(__file__).parents[2]) for rank in range(3)]
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("training-*"))) < 3:
        assert time.monotonic() < end
        assert all(rank.poll() is None for rank in ranks)
        time.sleep(0.05)
    three.cut_inbound(victim)
    while len(list(tmp_path.glob("stopped-*"))) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    said = [(tmp_path / f"stopped-{rank}").read_text() for rank in range(3)]
    named = [int(re.search(r"PeerError: .* failed: rank (\d)", words).group(1)) for words in said]
    assert all(name == victim for rank, name in enumerate(named) if rank != victim), said
    assert named[victim] != victim, said
    assert f"Rank {victim} has heard none of the other ranks" in said[victim], said
