"""Who is to blame, from what each rank saw: tables of reports, with the verdict of every rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.collectives.blame import Report, find_culprit

LONG, SHORT = 20.0, 0.5


def silences(size, deaf_pairs=(), rank=0):
    """What a rank last heard, where some pairs (listener, other) have heard nothing for long."""
    return tuple(0.0 if other == rank else LONG if (rank, other) in deaf_pairs else SHORT for other in range(size))


def reports(size, waits, deaf_pairs=(), **options):
    """Reports of ranks that timed out: whom each waited for, and who does not hear whom."""
    return {
        rank: Report(whom, timed_out=True, silences=silences(size, deaf_pairs, rank), **options)
        for rank, whom in waits.items()
    }


def both_ways(pairs):
    return {*pairs, *((other, rank) for rank, other in pairs)}


CUT_1_OF_3 = {(1, 0), (1, 2), (0, 1), (2, 1)}
CASES = {
    # size, whom each waits for, who does not hear whom; whom each rank that reports names
    "stuck in its program": (4, {0: 3, 1: 3, 2: 3}, (), {0: 3, 1: 3, 2: 3}),
    "stuck, by way of others": (4, {0: 1, 1: 2, 2: 3}, (), {0: 3, 1: 3, 2: 3}),
    "stopped": (3, {0: 2, 1: 2}, {(0, 2), (1, 2)}, {0: 2, 1: 2}),
    "stopped, by way of another": (3, {0: 1, 1: 2}, {(0, 2), (1, 2)}, {0: 2, 1: 2}),
    "stopped, all wait for all": (3, {0: None, 1: None}, {(0, 2), (1, 2)}, {0: 2, 1: 2}),
    "stuck, all wait for all": (3, {0: None, 2: None}, (), {0: 1, 2: 1}),
    "no rank is missing": (3, {0: None, 1: None, 2: None}, (), {0: None, 1: None, 2: None}),
    # The one whose network is cut accuses a healthy rank, which accuses it.
    "inbound cut, both accuse": (3, {0: 1, 1: 0, 2: 1}, CUT_1_OF_3, {0: 1, 2: 1}),
    "inbound cut, its words still come": (3, {0: 1, 1: 0, 2: 1}, {(1, 0), (1, 2)}, {0: 1, 2: 1}),
    "inbound cut, its words do not come": (3, {0: 1, 2: 0}, {(0, 1), (2, 1)}, {0: 1, 2: 1}),
    "inbound cut, and a rank is busy": (4, {0: 1, 1: 2, 3: 1}, {(1, 0), (1, 2), (1, 3), (0, 1), (3, 1)}, {0: 1, 3: 1}),
    "two cut of five": (
        5,
        {0: 1, 1: 0, 2: 3, 3: 4, 4: 1},
        both_ways({(1, other) for other in (0, 2, 3, 4)} | {(3, other) for other in (0, 1, 2, 4)}),
        {0: {1, 3}, 1: 3, 2: {1, 3}, 3: 1, 4: {1, 3}},
    ),
    "two ranks, cut": (2, {0: 1, 1: 0}, {(0, 1), (1, 0)}, {0: 1, 1: 0}),
    "two ranks, both run": (2, {0: 1, 1: 0}, (), {0: 1, 1: 0}),
    "a circle": (3, {0: 1, 1: 2, 2: 0}, (), {0: {1, 2}, 1: {0, 2}, 2: {0, 1}}),
    "a circle elsewhere": (4, {0: 1, 1: 2, 2: 1}, (), {0: {1, 2}, 1: 2, 2: 1}),
    "a circle with one that was quiet": (3, {0: 1, 1: 2, 2: 0}, {(0, 2), (1, 2)}, {0: 2, 1: 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_names_the_culprit(case):
    size, waits, deaf_pairs, expected = CASES[case]
    seen = reports(size, waits, deaf_pairs)
    for asking, named in expected.items():
        verdict = find_culprit(asking, seen, size)
        found = verdict and verdict.rank
        assert found in named if isinstance(named, set) else found == named, f"rank {asking} names {verdict}"
        assert verdict is None or not verdict.gone


def test_a_rank_whose_connection_ended_is_the_culprit_unless_it_reported():
    dead = {0: Report(2), 1: Report(3, gone=(3,)), 2: Report(1)}
    for asking in dead:
        verdict = find_culprit(asking, dead, 4)
        assert (verdict.rank, str(verdict)) == (3, "is gone")
    left = {0: Report(1, gone=(1,)), 1: Report(2, timed_out=True)}  # it reported, and ended
    verdict = find_culprit(0, left, 3)
    assert (verdict.rank, str(verdict)) == (2, "did not answer in time")


def test_a_rank_that_failed_by_itself_is_named_by_all_others():
    reports = {0: Report(1), 1: Report(None, failed="MemoryError"), 2: Report(0, timed_out=True, gone=(1,))}
    for asking in (0, 2):
        verdict = find_culprit(asking, reports, 3)
        assert (verdict.rank, str(verdict)) == (1, "failed with MemoryError")


def test_a_rank_that_hears_no_other_says_that_its_own_network_may_be_cut():
    alone = {1: Report(0, timed_out=True, silences=(LONG, 0.0, LONG))}
    verdict = find_culprit(1, alone, 3)
    assert verdict.rank == 0
    assert verdict.note.startswith("Rank 1 has heard none of the other ranks for 20 s: its own network may be cut")


def test_of_two_ranks_that_accuse_each_other_both_say_so():
    seen = {0: Report(1, timed_out=True), 1: Report(0, timed_out=True)}
    assert find_culprit(0, seen, 2).note == "Rank 1 says the same of rank 0: the network between them may be cut."


@st.composite
def groups(draw):
    size = draw(st.integers(2, 5))
    ranks = st.integers(0, size - 1)
    seconds = st.lists(st.sampled_from([0.0, SHORT, LONG, 1e9]), min_size=size, max_size=size)
    found = {
        rank: Report(
            draw(st.none() | ranks.filter(lambda other, rank=rank: other != rank)),
            draw(st.booleans()),
            tuple(draw(st.lists(ranks.filter(lambda other, rank=rank: other != rank), max_size=2))),
            draw(st.just(()) | seconds.map(tuple)),
        )
        for rank in draw(st.sets(ranks, min_size=1))
    }
    return size, found


@given(groups())
def test_no_rank_names_itself(group):
    size, found = group
    for asking in found:
        verdict = find_culprit(asking, found, size)
        assert verdict is None or verdict.rank != asking
        if found[asking].waited_for is not None:
            assert verdict is not None


@given(groups())
def test_a_report_survives_its_text(group):
    size, found = group
    for report in found.values():
        assert Report.from_text(report.to_text(), size) == report


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"7", b"\xff", b"[" * 9999,
     b'{"waited_for": 3, "timed_out": false, "gone": [], "silences": []}',
     b'{"waited_for": 1, "timed_out": 1, "gone": [], "silences": []}',
     b'{"waited_for": 1, "timed_out": true, "gone": [0.5], "silences": []}',
     b'{"waited_for": 1, "timed_out": true, "gone": [], "silences": [1]}',
     b'{"waited_for": 1, "timed_out": true, "gone": [], "silences": [NaN, 1, 2]}',
     b'{"waited_for": 1, "timed_out": true, "gone": 7, "silences": []}'],
)  # fmt: skip
def test_a_malformed_report_is_none(text):
    assert Report.from_text(text, 3) is None
