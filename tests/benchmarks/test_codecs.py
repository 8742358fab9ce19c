"""What a run of the contest reports."""

import pytest
import torch

from gradwire.benchmarks import Settings, run
from gradwire.benchmarks.codecs import GROUPS
from gradwire.benchmarks.timing import CpuClock, Timing, interleaved
from gradwire.errors import ConfigError

SMALL = {"elements": 5000, "rounds": 2, "compile": False}


def test_every_group_is_timed_with_its_peers_and_limits():
    report = run(Settings(**SMALL))
    assert {result.group for result in report.results} == set(GROUPS)
    assert report.settings.numel == 4096
    for result in report.results:
        assert "eager" in result.peers
        assert not result.failed
        assert result.ours.lower_quartile_s <= result.ours.median_s <= result.ours.upper_quartile_s
        assert result.ours.rounds == 2
        assert result.speedup == result.peers[result.best_peer].median_s / result.ours.median_s
        assert result.over_limit() == pytest.approx(result.ours.median_s / result.limit_s)
        # A share of the copy's bandwidth: the copy moves its bytes twice, the operation at least its minimum.
        moved = result.minimal_bytes / (2 * result.nbytes)
        assert result.bandwidth_share == pytest.approx(moved * result.copy.median_s / result.ours.median_s)


def test_any_codec_can_be_timed_if_only_by_itself():
    report = run(Settings(**SMALL, codecs=("natural", "ef(rotate(int3))", "topk:0.1+int8")))
    assert {(result.group, result.name) for result in report.results} >= {
        ("encode", "natural"),
        ("feedback", "ef(rotate(int3))"),
        ("decode_add_8", "topk:0.1+int8"),
    }
    assert all(result.best_peer is None and result.speedup is None for result in report.results)


def test_feedback_goes_on_with_its_own_state(monkeypatch):
    from gradwire.transforms import ErrorFeedback

    seen = []
    plain = ErrorFeedback.encode

    def watched(self, x, state, key):
        seen.append(float(state["residual"].norm()))
        return plain(self, x, state, key)

    monkeypatch.setattr(ErrorFeedback, "encode", watched)
    run(Settings(**SMALL, codecs=("ef(topk:0.01)",), groups=("feedback",)))
    assert seen[0] == 0.0
    assert len(set(seen)) == len(seen) == 4  # once to try, one warm-up, two rounds


def test_a_peer_that_does_not_compile_is_named_and_the_rest_is_timed(monkeypatch):
    def broken(function, **options):
        def fail(*arguments):
            raise RuntimeError("no compiler\nand many more lines")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    (result,) = run(Settings(**SMALL | {"compile": True}, codecs=("int8",), groups=("encode",))).results
    assert result.failed == {"compiled": "RuntimeError: no compiler"} | {
        name: "RuntimeError: no compiler" for name in result.failed if name.startswith("torchao")
    }
    assert "eager" in result.peers


def test_rounds_are_interleaved_in_changing_order_and_the_first_are_discarded():
    calls = []
    work = {name: (lambda name=name: calls.append(name)) for name in "abcd"}
    before = torch.get_num_threads()
    times = interleaved(work, rounds=5, warmup=2, clock=CpuClock(), threads=(1, 2))
    rounds = [calls[i : i + 4] for i in range(0, len(calls), 4)]
    assert len(rounds) == 2 * 7
    assert all(sorted(one) == list("abcd") for one in rounds)
    assert len({tuple(one) for one in rounds}) > 3
    assert times[2]["a"].rounds == 5
    assert torch.get_num_threads() == before


def test_timing_has_median_and_quartiles():
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Timing(3.0, 2.0, 4.0, 5)
    assert Timing.of([1.0]) == Timing(1.0, 1.0, 1.0, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"elements": 1000}, "`--elements` must be from 1024"),
        ({"rounds": 0}, "`--rounds` must be from 1 to 1000; got 0."),
        ({"threads": (0,)}, "`--threads` must be from 1 to 1024; got 0."),
        ({"groups": ("cook",)}, "`--op` must be one of feedback, encode"),
        ({"device": "tpu"}, "`--device` must be cpu or cuda; got 'tpu'."),
        ({"codecs": ("int5",)}, "unknown codec 'int5'"),
    ],
)
def test_settings_say_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        Settings(**settings)


def test_options_that_leave_nothing_are_refused():
    with pytest.raises(ConfigError, match="no operation is left"):
        run(Settings(**SMALL, codecs=("int8",), groups=("rotate",)))
