"""The gather collective between real processes."""

import json

import pytest

import gradwire
from gradwire.clusters import run_workers

CODECS = ("none", "int4", "ef(topk:0.1+int8)", "threshold:1", "ef21(int4)", "rotate(int3)")
FAULTS = ("codec", "nan", "step", "shape", "form", "sum")


@pytest.fixture(scope="module")
def said():
    """What three ranks said of every case, by case: one process group serves them all."""
    cases = [{"codec": c} for c in CODECS] + [{"codec": "fp16" if w == "form" else "int8", "wrong": w} for w in FAULTS]
    (ranks,) = run_workers("tests.workers.gather", {"cases": cases}, 3)
    return dict(zip(CODECS + FAULTS, zip(*map(json.loads, ranks), strict=True), strict=True))


def test_the_mean_of_three_ranks(said):
    for line in said["none"]:
        _, sent, dense, distance = line.split()
        assert float(distance) < 1e-6
        assert int(dense) == 2 * 2 * 1200 // 3  # a ring all-reduce
        assert int(sent) == 2 * gradwire.codec("none").layout(gradwire.TensorSpec((15, 20))).nbytes


@pytest.mark.parametrize("codec", CODECS)
def test_every_rank_ends_with_the_same_bits(said, codec):
    assert len(set(said[codec])) == 1
    assert "Error" not in said[codec][0]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (
            "codec",
            "PeerError: rank 1 has 'int8:block=64 (checksum 5865d297)', but rank 0 has 'int8 (checksum 467285d3)'",
        ),
        ("nan", "NonFiniteError: bucket 7 of step 1: NaN or Inf on ranks [1]."),
        ("sum", "NonFiniteError: bucket 7 of step 1: the sum of all ranks leaves float32."),
    ],
    ids=["codec", "nan", "sum"],
)
def test_a_rank_that_differs_is_named_on_every_rank(said, wrong, error):
    assert len(set(said[wrong])) == 1
    assert said[wrong][0].startswith(error)


@pytest.mark.parametrize(
    ("wrong", "sent"),
    [
        ("step", "int8 of TensorSpec(shape=(15, 20), dtype=torch.float32), step 2"),
        ("shape", "int8 of TensorSpec(shape=(20, 15)"),
        ("form", "bf16 of"),
    ],
)
def test_a_rank_that_sends_something_else_is_named_by_the_others(said, wrong, sent):
    first, second, third = said[wrong]
    assert first.startswith(f"PeerError: rank 1 sent {sent}")
    assert third == first
    assert second.startswith("PeerError: rank 0 sent")
