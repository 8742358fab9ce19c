"""Laws of every collective, with ranks as threads."""

import dataclasses
import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire import ConfigError, NonFiniteError, PeerError, TensorSpec, wire
from gradwire.collectives import Gather, LowRank, Pipeline, TwoStage, agree, method
from gradwire.collectives.loopback import Alone, Loopback
from gradwire.collectives.two_stage import slices
from gradwire.kernels.ops import orthogonalize
from tests.case import case

from .threads import TIMEOUT_S, Counting, on_every_rank, reduce_all, results, tensors

SIZES = (0, 1, 2, 1023, 1024, 4097, 10_000)
RANKS = (1, 2, 3, 4, 5)
SHAPES = ((24, 40), (7, 9), (64, 16))  # of matrices, for low rank
FLAT = (Gather, TwoStage)
CODECS = (
    "none", "fp16", "int8", "int4", "int2", "sign", "topk:0.1", "topk:0.1+int8", "blocktopk:0.1", "randomk:0.1",
    "threshold:1", "qsgd:16", "ternary", "natural", "rotate(int4)", "warmup:10(topk:0.1)", "fp8:e4m3",
    "ef(topk:0.1)", "ef(sign)", "ef(int4)",
)  # fmt: skip


def low_rank(peers, alternate, factors="none", start=0, rank=2):
    return LowRank(peers, SHAPES, rank=rank, factors=gradwire.codec(factors), start=start, alternate=alternate)


def flat(kind, codec):
    return lambda peers: kind(peers, gradwire.codec(codec))


KINDS = {
    **{f"{kind.__name__} {codec}": flat(kind, codec) for kind in FLAT for codec in CODECS},
    **{f"Gather {codec}": flat(Gather, codec) for codec in ("lowrank:2", "ef21(int4)", "dgc(topk:0.1)")},
    "LowRank": lambda peers: low_rank(peers, False),
    "LowRank int8": lambda peers: low_rank(peers, False, "int8"),
    "LowRank early": lambda peers: low_rank(peers, False, start=10),
    "LowRank alternate": lambda peers: low_rank(peers, True),
    "LowRank alternate int8": lambda peers: low_rank(peers, True, "int8"),
}
NUMEL = sum(rows * columns for rows, columns in SHAPES)


class Ranks:
    """A collective on every rank, with its state."""

    def __init__(self, make, ranks, numel, wrap=lambda peers: peers):
        self.collectives = [make(wrap(peers)) for peers in Loopback.ranks(ranks, TIMEOUT_S)]
        self.states = [c.init(TensorSpec((numel,))) for c in self.collectives]
        self.step = 0

    def reduce(self, xs, *, keep=True):
        outcomes = reduce_all(self.collectives, xs, self.states, self.step, tag=8 * self.step)
        self.step += 1
        if keep:
            self.states = [r.state for r in results(outcomes)]
        return outcomes

    def kept(self):
        """What the ranks hold back, as part of a mean: residuals of all, and what owners owe everybody."""
        ranks = len(self.states)
        total = sum(s["residual"].double().view(-1) for s in self.states) / ranks
        if "owned" in self.states[0]:
            total += torch.cat([s["owned"].double() for s in self.states])
        return total


def mean_of(xs):
    return torch.stack([x.double() for x in xs]).mean(dim=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_ends_with_the_same_bits(kind):
    for ranks in RANKS:
        group = Ranks(KINDS[kind], ranks, NUMEL)
        for step in range(4):
            with case(f"{ranks} ranks, step {step}"):
                got = results(group.reduce(tensors(ranks, NUMEL, seed=step)))
                assert all(torch.equal(got[0].mean, r.mean) for r in got)
                assert got[0].mean.dtype == torch.float32
                assert got[0].mean.shape == (NUMEL,)
                assert bool(got[0].mean.isfinite().all())


@settings(max_examples=60)
@given(st.sampled_from(SIZES) | st.integers(0, 6000), st.integers(1, 5), st.sampled_from(FLAT), st.integers(0, 9))
def test_the_mean_of_uncompressed_tensors_is_their_mean(numel, ranks, kind, seed):
    xs = tensors(ranks, numel, seed)
    mean = mean_of(xs)
    got = results(Ranks(flat(kind, "none"), ranks, numel).reduce(xs))
    for r in got:
        assert torch.equal(r.mean, got[0].mean)
        torch.testing.assert_close(r.mean.double(), mean, rtol=1e-6, atol=1e-6)


@settings(max_examples=60)
@given(
    st.sampled_from(SIZES) | st.integers(0, 6000),
    st.integers(1, 5),
    st.sampled_from(FLAT),
    st.sampled_from([("int8", 127), ("int4", 7)]),
    st.sampled_from([1e-20, 1.0, 1e20]),
)
def test_integers_are_off_by_a_step_of_the_largest_value_at_most(numel, ranks, kind, codec, scale):
    name, limit = codec
    xs = tensors(ranks, numel, 1, scale)
    mean, largest = mean_of(xs), max([float(x.abs().max()) for x in xs if numel], default=0.0)
    got = results(Ranks(flat(kind, name), ranks, numel).reduce(xs))
    if numel:
        # Half a step for the sum, and with two stages half a step for the mean; scales are rounded by 2**-7.
        bound = (1 if kind is TwoStage else 0.5) * largest / limit * (1 + 2**-6) * 1.1
        assert float((got[0].mean.double() - mean).abs().max()) <= bound


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("codec", ["none", "int4", "ef(topk:0.1)", "threshold:1", "rotate(int4)", "ef(sign)"])
def test_tensors_of_any_size(kind, codec):
    for numel in SIZES:
        group = Ranks(flat(kind, codec), 3, numel)
        for step in range(2):
            with case(f"{numel} values, step {step}"):
                got = results(group.reduce(tensors(3, numel, step)))
                assert all(torch.equal(got[0].mean, r.mean) for r in got)
                assert got[0].mean.shape == (numel,)


def assert_nothing_is_lost(make, numel, most):
    """What was applied and what is kept add up to the sum of the true means, for every number of ranks."""
    for ranks in RANKS:
        true, applied = 0.0, 0.0
        group = Ranks(make, ranks, numel)
        with case(f"{ranks} ranks"):
            for step in range(6):
                xs = tensors(ranks, numel, step)
                true = true + mean_of(xs)
                applied = applied + results(group.reduce(xs))[0].mean.double()
                torch.testing.assert_close(applied + group.kept(), true, rtol=0, atol=most)
            assert float(group.kept().abs().max()) > 0.01


@pytest.mark.parametrize("codec", ["ef(topk:0.1)", "ef(sign)", "ef(int4)", "ef(int2)", "ef(randomk:0.1)"])
@pytest.mark.parametrize("kind", FLAT)
def test_error_feedback_loses_nothing(kind, codec):
    assert_nothing_is_lost(flat(kind, codec), 5003, 1e-5)


@pytest.mark.parametrize(
    ("alternate", "factors"),
    [(False, "none"), (False, "int8"), (False, "int4"), (True, "none")],  # acp loses what quantizing its factor loses
)
def test_low_rank_loses_nothing(alternate, factors):
    assert_nothing_is_lost(lambda peers: low_rank(peers, alternate, factors), NUMEL, 1e-4)


@pytest.mark.parametrize("alternate", [False, True], ids=["powersgd", "acp"])
def test_low_rank_finds_a_matrix_of_low_rank(alternate):
    generator = torch.Generator().manual_seed(0)
    left = [torch.randn(rows, 2, generator=generator) for rows, _ in SHAPES]
    right = [torch.randn(columns, 2, generator=generator) for _, columns in SHAPES]
    x = torch.cat([(a @ b.t()).view(-1) for a, b in zip(left, right, strict=True)])
    group = Ranks(lambda peers: low_rank(peers, alternate), 3, NUMEL)
    applied = sum(results(group.reduce([x, x, x]))[0].mean for _ in range(6))
    assert float((applied / 6 - x).norm() / x.norm()) < 0.2


def copied(states):
    return [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in s.items()} for s in states]


@pytest.mark.parametrize(
    "kind",
    [
        *("Gather int4", "TwoStage int4", "TwoStage ef(topk:0.1)", "TwoStage none", "Gather ef21(int4)"),
        *("LowRank", "LowRank int8", "LowRank early", "LowRank alternate", "LowRank alternate int8"),
    ],
)
def test_a_value_that_is_not_finite_is_named_on_every_rank(kind):
    values = itertools.cycle([torch.nan, torch.inf, -torch.inf])
    for ranks in RANKS:
        group = Ranks(KINDS[kind], ranks, NUMEL)
        for bad in range(ranks):
            wrong = next(values)
            with case(f"{wrong} on rank {bad} of {ranks}"):
                results(group.reduce(tensors(ranks, NUMEL, 1)))
                before = copied(group.states)
                xs = tensors(ranks, NUMEL, 2)
                xs[bad][(bad * 977) % NUMEL] = wrong
                for error in group.reduce(xs, keep=False):
                    assert isinstance(error, NonFiniteError)
                    assert str(error) == f"bucket 3 of step {group.step - 1}: NaN or Inf on ranks [{bad}]."
                for old, state in zip(before, group.states, strict=True):
                    assert all(torch.equal(old[k], v) for k, v in state.items() if isinstance(v, torch.Tensor))
        got = results(group.reduce(tensors(ranks, NUMEL, 3)))
        assert all(torch.equal(got[0].mean, r.mean) for r in got)


def test_every_rank_that_has_a_nan_is_named():
    for kind in ("Gather int4", "TwoStage ef(topk:0.1)", "LowRank"):
        xs = tensors(4, NUMEL)
        xs[0][0] = xs[3][-1] = torch.nan
        for error in Ranks(KINDS[kind], 4, NUMEL).reduce(xs, keep=False):
            assert str(error) == "bucket 3 of step 0: NaN or Inf on ranks [0, 3]."


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("codec", ["none", "int8", "ef(topk:0.5)"])
def test_a_sum_that_leaves_float32_is_an_error_on_every_rank(kind, codec, ranks):
    group = Ranks(flat(kind, codec), ranks, 4097)
    xs = [torch.full((4097,), 3e38) for _ in range(ranks)]
    for error in group.reduce(xs, keep=False):
        assert isinstance(error, NonFiniteError)
        assert str(error) == "bucket 3 of step 0: the sum of all ranks leaves float32."
    results(group.reduce(tensors(ranks, 4097)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensor_and_the_state_given_stay_as_they_are(kind):
    for ranks in (1, 2, 3):
        with case(f"{ranks} ranks"):
            group = Ranks(KINDS[kind], ranks, NUMEL)
            results(group.reduce(tensors(ranks, NUMEL, 0)))
            xs, before = tensors(ranks, NUMEL, 1), tensors(ranks, NUMEL, 1)
            states = copied(group.states)
            results(group.reduce(xs, keep=False))
            assert all(map(torch.equal, xs, before))
            for state, old in zip(group.states, states, strict=True):
                for k, v in state.items():
                    assert torch.equal(v, old[k]) if isinstance(v, torch.Tensor) else v == old[k]


sizes_of_tensors = st.lists(st.integers(0, 3000), min_size=1, max_size=5)


@settings(max_examples=80)
@given(sizes_of_tensors, st.integers(1, 5), st.sampled_from(["ef(topk:0.1)", "ef(sign)"]), st.sampled_from(FLAT))
def test_state_by_tensor_and_back_is_the_same(sizes, ranks, codec, kind):
    group = Ranks(flat(kind, codec), ranks, sum(sizes))
    results(group.reduce(tensors(ranks, sum(sizes))))
    for c, state in zip(group.collectives, group.states, strict=True):
        pieces = c.by_tensor(state, sizes)
        assert [p["residual"].numel() for p in pieces] == sizes
        again = c.from_tensors(pieces, sizes)
        assert again.keys() == state.keys()
        assert all(torch.equal(again[k].view(-1), state[k].view(-1)) for k in state)


@settings(max_examples=80)
@given(st.lists(st.integers(0, 3000), min_size=2, max_size=5), st.integers(1, 5), st.data())
def test_tensors_that_go_to_other_buckets_lose_nothing(sizes, ranks, data):
    """Reduced as one, then in two parts in another order, then as one again."""
    make = flat(TwoStage, "ef(topk:0.1)")
    group = Ranks(make, ranks, sum(sizes))
    results(group.reduce(tensors(ranks, sum(sizes))))
    order = data.draw(st.permutations(range(len(sizes))))
    cut = data.draw(st.integers(1, len(sizes) - 1))
    pieces = [c.by_tensor(s, sizes) for c, s in zip(group.collectives, group.states, strict=True)]
    kept = list(torch.split(group.kept(), sizes))
    for part in (order[:cut], order[cut:]):
        other = [sizes[i] for i in part]
        group.states = [
            c.from_tensors([p[i] for i in part], other) for c, p in zip(group.collectives, pieces, strict=True)
        ]
        expected = torch.cat([kept[i] for i in part])
        torch.testing.assert_close(group.kept(), expected, rtol=1e-5, atol=1e-5)
        xs = tensors(ranks, sum(other), 5)
        got = results(group.reduce(xs))[0]
        torch.testing.assert_close(got.mean.double() + group.kept(), mean_of(xs) + expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alternate", [False, True])
def test_low_rank_state_by_tensor_and_back_is_the_same(alternate):
    sizes = [rows * columns for rows, columns in SHAPES]
    group = Ranks(lambda peers: low_rank(peers, alternate), 3, NUMEL)
    for step in range(2):
        results(group.reduce(tensors(3, NUMEL, step)))
    for c, state in zip(group.collectives, group.states, strict=True):
        again = c.from_tensors(c.by_tensor(state, sizes), sizes)
        assert all(torch.equal(again[k], state[k]) for k in state), "a round trip changes the state"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_that_travelled(kind):
    for ranks in RANKS:
        group = Ranks(KINDS[kind], ranks, NUMEL, wrap=Counting)
        with case(f"{ranks} ranks"):
            for r, c in zip(results(group.reduce(tensors(ranks, NUMEL))), group.collectives, strict=True):
                assert r.sent_bytes == sum(c.peers.sent)
                assert r.received_bytes == sum(c.peers.received)
                assert r.dense_sent_bytes == 2 * (ranks - 1) * 4 * NUMEL // ranks
                assert (r.sent_bytes == 0) == (ranks == 1)


def flipped(data):
    changed = data.clone()
    changed[len(data) // 3] ^= 1
    return changed


def cut(data):
    changed = torch.zeros_like(data)
    changed[: len(data) // 2] = data[: len(data) // 2]
    return changed


def repacked(data, trailer, **changes):
    """The frame with other fields and a right checksum."""
    frame = data[: len(data) - trailer]
    payload = dataclasses.replace(wire.unpack(frame.numpy(), padded=True), **changes)
    changed = data.clone()
    wire.pack_into(payload, changed[: len(frame)])
    return changed


def other_step(data, trailer=0):
    return repacked(data, trailer, key=gradwire.Key(1, 99, 3))


def other_parts(data, trailer=0):
    payload = wire.unpack(data[: len(data) - trailer].numpy(), padded=True)
    return repacked(data, trailer, parts=tuple(p[: len(p) // 2] for p in payload.parts))


@pytest.mark.parametrize("how", ["flipped", "cut", "noise", "zeros", "other_step", "other_parts"])
@pytest.mark.parametrize(("kind", "stage"), [(Gather, 0), (TwoStage, 0), (TwoStage, 1)])
def test_bytes_that_are_no_payload_of_the_reduction_name_their_sender(kind, how, stage):
    trailer = 3 if stage else 0  # the owners' words on who sent NaN

    def change(data, to, tag):
        if tag != stage:
            return data
        return {
            "flipped": flipped,
            "cut": cut,
            "noise": lambda data: torch.randint(0, 256, data.shape, dtype=torch.uint8),
            "zeros": torch.zeros_like,
            "other_step": functools.partial(other_step, trailer=trailer),
            "other_parts": functools.partial(other_parts, trailer=trailer),
        }[how](data)

    def wrap(peers):
        return Counting(Loopback(peers.rank, 3, 1.0, peers.mail), change=change if peers.rank == 1 else None)

    outcomes = Ranks(flat(kind, "int8"), 3, 9000, wrap).reduce(tensors(3, 9000), keep=False)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], PeerError), outcomes[rank]
        assert "rank 1 sent" in str(outcomes[rank])


def test_a_rank_that_sends_nothing_is_named():
    peers = Loopback.ranks(3, 0.5)
    body = lambda p: p.rank != 2 and agree(p, "all is well")  # noqa: E731
    first, second, _ = on_every_rank(body, 3, peers)
    assert str(first) == str(second) == "the agreement of all ranks failed: rank 2 sent nothing for 0.5 s."


def test_ranks_that_disagree_are_named():
    for error in on_every_rank(lambda p: agree(p, "x" * 2000 + str(p.rank == 2)), 3):
        assert isinstance(error, PeerError)
        assert str(error).startswith("rank 2 has 'xxx")


@given(st.integers(0, 20_000), st.integers(1, 9))
def test_slices_are_the_whole_of_a_tensor_once(numel, ranks):
    parts = slices(numel, ranks)
    assert len(parts) == ranks
    assert torch.equal(torch.cat([torch.arange(numel)[part] for part in parts]), torch.arange(numel))
    assert all(part.start % 1024 == 0 or part.start == numel for part in parts)


def test_two_stages_refuse_a_codec_with_a_state():
    with pytest.raises(ConfigError, match=r"must have no state but error feedback's, to be sliced; got 'ef21\(int4\)'"):
        TwoStage(Alone(), gradwire.codec("ef21(int4)"))


def test_low_rank_refuses_bad_settings():
    with pytest.raises(ConfigError, match="`rank` must be from 1 to 1024; got 0"):
        LowRank(Alone(), SHAPES, rank=0)
    with pytest.raises(ConfigError, match="`start` must not be negative; got -1"):
        LowRank(Alone(), SHAPES, start=-1)


def test_a_pipeline_that_is_closed_does_what_was_submitted():
    one, two = Loopback.ranks(2, TIMEOUT_S)
    pipelines = [Pipeline(), Pipeline()]
    futures = []
    for pipeline, peers in zip(pipelines, (one, two), strict=True):
        gather = TwoStage(peers, gradwire.codec("none"))
        futures.append(pipeline.submit(gather.reduce(torch.ones(3), {}, gradwire.Key(), 0)))
        pipeline.close()
    for future in futures:
        assert torch.equal(future.result(TIMEOUT_S / 4).mean, torch.ones(3))


# orthogonalize


@settings(max_examples=100)
@given(st.integers(1, 80), st.integers(1, 16), st.integers(0, 99), st.sampled_from([1e-30, 1e-10, 1.0, 1e10, 1e30]))
def test_orthogonalized_columns_are_orthonormal(rows, columns, seed, scale):
    columns = min(rows, columns)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    (p,) = orthogonalize([x])
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.T @ p, torch.eye(columns), rtol=0, atol=1e-5)
    # They span what was given.
    unit = x.double() / x.double().norm()
    torch.testing.assert_close(p.double() @ (p.double().T @ unit), unit, rtol=0, atol=1e-5)


def test_orthogonalized_zeros_stay_zeros():
    assert not orthogonalize([torch.zeros(20, 4)])[0].any()


@settings(max_examples=100)
@given(st.integers(2, 40), st.integers(2, 8), st.integers(0, 99), st.sampled_from([1e-30, 1.0, 1e30]))
def test_columns_without_full_rank_give_no_nan(rows, columns, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(rows, 1, generator=generator) * scale
    for x in (one.expand(rows, columns).clone(), torch.cat([one, torch.zeros(rows, columns - 1)], dim=1)):
        (p,) = orthogonalize([x])
        assert bool(p.isfinite().all())
        assert float(p.norm(dim=0).max()) <= 1 + 1e-5
        unit = one[:, 0].double() / one.double().norm()
        assert float((p.double().T @ unit).norm()) > 0.99  # the one direction there is, is kept


def test_columns_of_different_magnitudes():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e4, 1.0, 1e-2, 1e-4])
    (p,) = orthogonalize([x])
    assert bool(p.isfinite().all())
    gram = p.T @ p
    assert float((gram - torch.diag(gram.diagonal())).abs().max()) < 1e-4


def test_factors_of_several_ranks_at_once_are_those_of_each_alone():
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(rows, rank, generator=generator) for rows, rank in [(9, 2), (30, 4), (12, 2), (5, 5)]]
    for p, x in zip(orthogonalize(factors), factors, strict=True):
        torch.testing.assert_close(p, orthogonalize([x])[0], rtol=0, atol=1e-6)


# Methods as strings


@pytest.mark.parametrize(
    "text",
    [
        *("powersgd:16", "powersgd:16+int8", "acp:8", "acp:8,start=5+int8", "powersgd:1,start=0"),
        *("powersgd:1024+rotate(int4)", "int4", "none", "ef(topk:0.01)", "ef21(int4)", "dgc(topk:0.05)", "qsgd:16"),
    ],
)
def test_a_method_is_the_string_that_made_it(text):
    made = method(text)
    assert str(made) == text or str(made) == f"ef({text})"
    assert method(str(made)) == made
    assert method(made) == made


def test_biased_codecs_get_error_feedback_unless_told_otherwise():
    assert str(method("topk:0.01")) == "ef(topk:0.01)"
    assert str(method("topk:0.01", feedback=False)) == "topk:0.01"
    assert str(method("int4")) == "int4"
    assert str(method("powersgd:4,start=10+none")) == "powersgd:4"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("powersgd", r"must be like 'powersgd:16', .*; got 'powersgd'"),
        ("powersgd:", "must be like 'powersgd:16'"),
        ("powersgd:x", "must be like 'powersgd:16'"),
        ("powersgd:-1", "must be like 'powersgd:16'"),
        ("acp:4,stop=3", "must be like 'powersgd:16'"),
        ("powersgd:4+", "must be like 'powersgd:16'"),
        ("powersgd:0", "rank of 'powersgd' must be from 1 to 1024; got 0"),
        ("acp:1025", "rank of 'acp' must be from 1 to 1024; got 1025"),
        ("powersgd:4+nope", "unknown codec 'nope'"),
        ("powersgd:4+ef(int4)", "the factors of 'powersgd' must travel in a codec without state; got 'ef"),
        ("powersgd:4+ef21(int4)", "must travel in a codec without state"),
        ("powersgd:4+lowrank:2", "the factors of 'powersgd' must travel"),
        ("nope", "unknown codec 'nope'"),
        ("", "."),
    ],
)
def test_a_method_that_is_none(text, message):
    with pytest.raises(ConfigError, match=message):
        method(text)


@pytest.mark.parametrize("what", [None, 4, ["int4"], b"int4"])
def test_a_method_that_is_no_string(what):
    with pytest.raises(ConfigError):
        method(what)
