"""The gradient reducer, with ranks as threads."""

import copy
import gc
import threading
import time
import weakref
from concurrent.futures import wait

import pytest
import torch
from torch import nn

import gradwire
from gradwire import ConfigError, NonFiniteError, PeerError
from gradwire.collectives.loopback import Alone, Loopback
from gradwire.reducer import GradientReducer, _Countdown

from .collectives.threads import TIMEOUT_S, Counting, Gate, on_every_rank, results

SHAPES = {"a": (80, 64), "bias": (64,), "b": (64, 100), "scale": (), "c": (5, 30, 40), "norm": (100,), "d": (9000, 1)}
LARGE = ("a", "b", "c", "d")
METHODS = ("none", "int4", "ef(topk:0.05)", "ef(sign)", "ef21(int4)", "dgc(topk:0.05)", "lowrank:2")
METHODS += ("powersgd:2,start=1", "powersgd:2,start=0+int8", "acp:2,start=1+int8", "warmup:4(topk:0.05)")


def parameters(dtypes=None):
    dtypes = dtypes or {}
    return {n: nn.Parameter(torch.zeros(s, dtype=dtypes.get(n, torch.float32))) for n, s in SHAPES.items()}


def gradients_of(rank, step, dtypes=None, scale=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtypes = dtypes or {}
    return {
        n: (scale * torch.randn(s, generator=generator)).to(dtypes.get(n, torch.float32)) for n, s in SHAPES.items()
    }


def true_mean(ranks, step, name):
    return sum(gradients_of(r, step)[name].double() for r in range(ranks)) / ranks


def reducers(what, ranks, **options):
    return results(
        on_every_rank(lambda p: GradientReducer(parameters(options.pop("dtypes", None)), what, p, **options), ranks)
    )


def reduce(group, step, bad=None, dtypes=None, scale=1.0, where="b"):
    """A step on every rank: the gradients after it, or the error. ``bad`` has a NaN."""

    def body(peers):
        reducer = group[peers.rank]
        for name, gradient in gradients_of(peers.rank, step, dtypes, scale).items():
            if peers.rank == bad and name == where:
                gradient.view(-1)[-1] = torch.nan
            reducer.parameters[name].grad = gradient
        reducer.reduce()
        return {name: p.grad.clone() for name, p in reducer.parameters.items()}

    return on_every_rank(body, len(group), [reducer.peers for reducer in group])


def in_buckets(group, step, buckets):
    """A step on every rank, bucket by bucket."""

    def body(peers):
        reducer, gradients = group[peers.rank], gradients_of(peers.rank, step)
        futures = []
        for i, names in enumerate(buckets):
            these = [gradients[n] for n in names]
            futures.append(reducer.start(names, these, last=i == len(buckets) - 1))
        for future in futures:
            future.result(TIMEOUT_S)
        return gradients

    return results(on_every_rank(body, len(group), [reducer.peers for reducer in group]))


def same(outcomes):
    for name in SHAPES:
        assert all(torch.equal(outcomes[0][name], outcome[name]) for outcome in outcomes), name
    return outcomes[0]


def kept(states, ranks, name):
    """What all ranks hold back of a parameter, as part of a mean."""
    total = torch.zeros(SHAPES[name], dtype=torch.float64).view(-1)
    for state in states:
        mine = state["states"][name]
        total += mine["residual"].view(-1) / ranks
        if "owned" in mine:
            at = mine["owned_from"]
            total[at : at + len(mine["owned"])] += mine["owned"]
    return total.view(SHAPES[name])


def state_dicts(group):
    return [copy.deepcopy(reducer.state_dict()) for reducer in group]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("what", METHODS)
def test_every_rank_ends_with_the_same_bits(what, ranks):
    group = reducers(what, ranks)
    for step in range(4):
        got = same(results(reduce(group, step)))
        for name in set(SHAPES) if what == "none" else set(SHAPES) - set(LARGE):
            torch.testing.assert_close(got[name].double(), true_mean(ranks, step, name), rtol=1e-5, atol=1e-6)
        assert all(bool(g.isfinite().all()) for g in got.values())
    assert group[0].step == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("what", ["ef(topk:0.05)", "ef(int4)", "powersgd:2,start=0+int8"])
def test_other_buckets_lose_nothing(what, ranks):
    group = reducers(what, ranks)
    names = list(SHAPES)
    bucketings = [
        [names],
        [["d", "norm", "c"], ["scale", "b"], ["bias", "a"]],
        [["a"], ["bias", "b", "scale"], ["c", "norm", "d"]],
        [["a"], ["bias", "b", "scale"], ["c", "norm", "d"]],
        [names[::-1]],
    ]
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, buckets in enumerate(bucketings):
        got = same(in_buckets(group, step, buckets))
        states = state_dicts(group)
        for name in set(SHAPES) - ({"d"} if what.startswith("powersgd") else set()):  # which is in int8 then
            total[name] += true_mean(ranks, step, name) - got[name]
            expected = kept(states, ranks, name) if name in LARGE else torch.zeros(SHAPES[name])
            torch.testing.assert_close(total[name], expected.double(), rtol=0, atol=1e-4)
    assert set(states[0]["states"]) >= {"a", "b"}


@pytest.fixture
def small_matrices(monkeypatch):
    """Among the others, matrices that are too small to be encoded by themselves, and a vector that looks like one."""
    for name, shape in {"e": (40, 60), "f": (30, 50), "g": (8, 100), "row": (1, 900)}.items():
        monkeypatch.setitem(SHAPES, name, shape)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("what", METHODS)
def test_small_matrices_of_a_bucket_are_encoded_together(small_matrices, what, ranks):
    """Unless each would be a message."""
    group = reducers(what, ranks)
    together = what in ("none", "int4", "ef(topk:0.05)", "ef(sign)", "warmup:4(topk:0.05)")
    for step in range(2):
        got = same(results(reduce(group, step)))
        for name in set(SHAPES) - set(LARGE):
            exact = torch.allclose(got[name].double(), true_mean(ranks, step, name), atol=1e-6)
            assert exact == (what == "none" or not together or name not in ("e", "f", "g")), name
    assert ("e" in group[0].state_dict()["states"]) == (together and what not in ("none", "int4"))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("what", ["ef(topk:0.05)", "ef(int4)"])
def test_small_matrices_that_come_to_other_buckets_lose_nothing(small_matrices, what, ranks):
    """Where they are too few to be encoded, what was kept back travels in float32 with them."""
    group, names = reducers(what, ranks), list(SHAPES)
    apart = [["e", "row", "norm"], ["d", "c"], ["f", "g", "scale", "b"], ["bias", "a"]]
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, buckets in enumerate([[names], apart, apart, [names[::-1]], apart]):
        got = same(in_buckets(group, step, buckets))
        states = state_dicts(group)
        assert ("e" in states[0]["states"]) == (buckets is not apart)
        assert {"a", "f", "g"} <= states[0]["states"].keys()
        for name in SHAPES:
            total[name] += true_mean(ranks, step, name) - got[name]
            missing = name not in states[0]["states"]
            expected = torch.zeros(SHAPES[name]) if missing else kept(states, ranks, name)
            torch.testing.assert_close(total[name], expected.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("ranks", "then"), [(3, 2), (2, 3), (2, 2)])
def test_residuals_of_small_matrices_are_saved_and_loaded_by_name(small_matrices, ranks, then):
    before, after = reducers("ef(topk:0.05)", ranks), reducers("ef(topk:0.05)", then)
    sent = [reduce(before, 0), reduce(before, 1)]
    states = state_dicts(before)
    for reducer in after:
        reducer.load_state_dict(states)
    sent += [reduce(after, 2)]
    for reducer in after:
        reducer.assign(dict.fromkeys(SHAPES, "none"))
    sent += [reduce(after, 3), reduce(after, 4)]
    for name in SHAPES:
        total = sum(results(each)[0][name].double() for each in sent)
        wanted = sum(true_mean(ranks if s < 2 else then, s, name) for s in range(5))
        torch.testing.assert_close(total, wanted, rtol=0, atol=1e-4)


def test_a_state_of_a_version_that_sent_small_matrices_in_float32(small_matrices):
    group, again = reducers("ef(topk:0.05)", 2), reducers("ef(topk:0.05)", 2)
    results(reduce(group, 0))
    for reducer, state in zip(again, state_dicts(group), strict=True):
        for name in ("e", "f", "g"):
            del state["states"][name]
        reducer.load_state_dict(state)
    same(results(reduce(again, 1)))
    assert {"a", "e", "f", "g"} <= set(again[0].state_dict()["states"])


@pytest.mark.parametrize("nonfinite", ["raise", "propagate"])
@pytest.mark.parametrize("where", ["a", "b", "bias", "scale"])
@pytest.mark.parametrize(
    "what", ["ef(topk:0.05)", "ef21(int4)", "dgc(topk:0.05)", "powersgd:2,start=0", "acp:2,start=0"]
)
def test_a_failed_step_commits_nothing(what, where, nonfinite):
    group = reducers(what, 3, nonfinite=nonfinite)
    for step in range(2):
        results(reduce(group, step))
    before = state_dicts(group)
    outcomes = reduce(group, 2, bad=1, where=where)
    for outcome in outcomes:
        if nonfinite == "raise":
            assert isinstance(outcome, NonFiniteError)
            assert "NaN or Inf on ranks [1]" in str(outcome)
        else:
            assert bool(outcome[where].isnan().all())
    after = state_dicts(group)
    for old, new in zip(before, after, strict=True):
        assert new["step"] == old["step"] + 1
        assert_equal(old["states"], new["states"])
    same(results(reduce(group, 3)))


def test_an_error_names_the_parameter_that_its_bucket_begins_with():
    def body(peers):
        reducer, gradients = GradientReducer(parameters(), "int4", peers), gradients_of(peers.rank, 0)
        gradients["b"][0, 0] = torch.nan if peers.rank == 1 else 0.0
        buckets = (["c", "norm", "d"], ["b", "scale"], ["a", "bias"])
        started = [reducer.start(names, [gradients[n] for n in names], last="a" in names) for names in buckets]
        for future in started:
            future.exception(TIMEOUT_S)
        return started[1].result()

    for error in on_every_rank(body, 3):
        assert isinstance(error, NonFiniteError)
        assert str(error) == "bucket 3 of step 0: NaN or Inf on ranks [1]. Bucket 3 begins with parameter 'b'."


def assert_equal(these, those):
    assert these.keys() == those.keys()
    for name in these:
        assert these[name].keys() == those[name].keys()
        for key, value in these[name].items():
            other = those[name][key]
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, (name, key)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("what", [*METHODS, "int4:rounding=stochastic"])
def test_a_resumed_reducer_goes_on_bit_for_bit(what, ranks):
    at_once, broken = reducers(what, ranks, seed=5), reducers(what, ranks, seed=5)
    for step in range(3):
        results(reduce(at_once, step))
        results(reduce(broken, step))
    states = state_dicts(broken)
    resumed = reducers(what, ranks, seed=5)
    for reducer, state in zip(resumed, states, strict=True):
        reducer.load_state_dict(state)
    for step in range(3, 6):
        want, got = same(results(reduce(at_once, step))), same(results(reduce(resumed, step)))
        assert all(torch.equal(want[name], got[name]) for name in SHAPES)
    assert state_dicts(resumed)[0]["step"] == 6


def test_a_state_may_be_saved_again_before_a_step():
    group = reducers("ef(topk:0.05)", 3)
    results(reduce(group, 0))
    states = state_dicts(group)
    again = reducers("ef(topk:0.05)", 3)
    for reducer, state in zip(again, states, strict=True):
        reducer.load_state_dict(state)
    for one, other in zip(states, state_dicts(again), strict=True):
        assert_equal(one["states"], other["states"])
        assert {k: v for k, v in one.items() if k != "states"} == {k: v for k, v in other.items() if k != "states"}


@pytest.mark.parametrize("what", METHODS)
def test_a_state_holds_tensors_numbers_and_strings_only(what, tmp_path):
    group = reducers(what, 3)
    results(reduce(group, 0))
    state = group[1].state_dict()

    def check(value):
        if isinstance(value, dict):
            for key, each in value.items():
                assert type(key) is str
                check(each)
        else:
            assert type(value) in (int, float, str, torch.Tensor), type(value)

    check(state)
    torch.save(state, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert_equal(state["states"], loaded["states"])
    assert (state["method"], state["rank"], state["ranks"], state["step"]) == (str(group[1].method), 1, 3, 1)


def test_a_saved_state_does_not_change():
    group = reducers("ef(topk:0.05)", 2)
    results(reduce(group, 0))
    states, copies = [r.state_dict() for r in group], state_dicts(group)
    for step in range(1, 3):
        results(reduce(group, step))
    for one, other in zip(states, copies, strict=True):
        assert_equal(one["states"], other["states"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "int8"}, r"`state` has method 'int8'; this reducer has 'ef\(topk:0.05\)'"),
        ({"ranks": 4}, "`state` has ranks 4; this reducer has 1"),
        ({"rank": 2}, "`state` has rank 2; this reducer has 0"),
        ({"method": None}, "`state` has method None"),
        ({"states": {"nope": {}, "a": {}}}, r"`state` has parameters that the model has not: \['nope'\]"),
        ({"step": -1}, "`state` must have a step of 0 or more; got -1"),
        ({"step": "1"}, "`state` must have a step of 0 or more; got '1'"),
        ({"scale": 0.0}, "`state` must have a scale above 0; got 0.0"),
        ({"scale": float("nan")}, "`state` must have a scale above 0; got nan"),
        ({"states": [1]}, "`state` must have 'states' of tensors and whole numbers, by parameter"),
        ({"states": {"a": {"residual": "x"}}}, "`state` must have 'states' of tensors and whole numbers"),
        ({"states": {"a": {"residual": torch.zeros(7)}}}, "a residual of 7 elements for 'a'; the parameter has 5120"),
    ],
)
def test_a_state_of_another_reducer_is_refused(change, message):
    reducer = GradientReducer(parameters(), "topk:0.05", Alone())
    reducer.reduce()
    state = reducer.state_dict()
    with pytest.raises(ConfigError, match=message):
        reducer.load_state_dict({**state, **change})
    assert_equal(state["states"], reducer.state_dict()["states"])


@pytest.mark.parametrize("state", [{}, None, {"states": {}}])
def test_a_state_of_something_else_is_refused(state):
    reducer = GradientReducer(parameters(), "topk:0.05", Alone())
    with pytest.raises(ConfigError, match=r"`state` must come from state_dict\(\), with \['method', 'rank'"):
        reducer.load_state_dict(state)


@pytest.mark.parametrize("what", ["ef(topk:0.05)", "ef(sign)", "powersgd:2,start=0", "acp:2,start=0", "dgc(topk:0.05)"])
@pytest.mark.parametrize("saved", [False, True], ids=["", "saved"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_means_do_not_depend_on_the_loss_scale(what, ranks, saved):
    """Scaled by powers of two, the same bits; also if the state is saved before the scale changes."""
    scale = [1024.0]
    plain, scaled = reducers(what, ranks), reducers(what, ranks, scale=lambda: scale[0])
    for step, now in enumerate([1024.0, 512.0, 512.0, 2048.0]):
        if saved:
            state_dicts(scaled)
        scale[0] = now
        want = same(results(reduce(plain, step)))
        got = same(results(reduce(scaled, step, scale=now)))
        for name in SHAPES:
            torch.testing.assert_close(got[name] / now, want[name], rtol=1e-5, atol=1e-7)


def test_a_resumed_reducer_follows_a_new_loss_scale():
    scale = [1024.0]
    plain, scaled = reducers("ef(topk:0.05)", 3), reducers("ef(topk:0.05)", 3, scale=lambda: scale[0])
    results(reduce(plain, 0))
    results(reduce(scaled, 0, scale=1024.0))
    states = state_dicts(scaled)
    scale[0] = 256.0
    resumed = reducers("ef(topk:0.05)", 3, scale=lambda: scale[0])
    for reducer, state in zip(resumed, states, strict=True):
        reducer.load_state_dict(state)
    for step in (1, 2):
        want, got = same(results(reduce(plain, step))), same(results(reduce(resumed, step, scale=256.0)))
        for name in SHAPES:
            torch.testing.assert_close(got[name] / 256.0, want[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("what", ["none", "int8", "ef(topk:0.5)", "powersgd:2,start=0"])
def test_parameters_of_several_dtypes(what):
    dtypes = {"a": torch.bfloat16, "bias": torch.bfloat16, "b": torch.float16, "norm": torch.float16}
    group = results(on_every_rank(lambda p: GradientReducer(parameters(dtypes), what, p), 3))
    for step in range(2):
        got = same(results(reduce(group, step, dtypes=dtypes)))
        for name in SHAPES:
            assert got[name].dtype == dtypes.get(name, torch.float32)
            if what in ("none", "int8"):
                torch.testing.assert_close(got[name].double(), true_mean(3, step, name), rtol=0, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["dense", "none", "int8"])
def test_a_mean_is_the_same_bits_in_the_memory_of_a_bucket(what, dtype):
    """DDP hands over the memory of a bucket. In 16 bits a sum there would be rounded once a rank."""
    group = results(on_every_rank(lambda p: GradientReducer(parameters({"a": dtype}), what, p), 3))

    def body(peers, in_place):
        flat = (gradients_of(peers.rank, 0)["a"].to(dtype)).view(-1)
        reducer = group[peers.rank]
        done = reducer.start(["a"], [flat.view(80, 64)], last=True, flat=flat if in_place else None)
        done.result(TIMEOUT_S)
        return flat

    peers = [reducer.peers for reducer in group]
    copied = results(on_every_rank(lambda each: body(each, False), 3, peers))
    in_place = results(on_every_rank(lambda each: body(each, True), 3, peers))
    assert all(torch.equal(mean, copied[0]) for mean in (*copied, *in_place))
    mean = sum(gradients_of(rank, 0)["a"].to(dtype).double() for rank in range(3)).view(-1) / 3
    torch.testing.assert_close(in_place[0].double(), mean, rtol=0.01, atol=0.05 if what == "int8" else 1e-6)


def test_a_missing_gradient_counts_as_zeros():
    group = reducers("none", 2)

    def body(peers):
        reducer = group[peers.rank]
        if peers.rank == 0:
            for p in reducer.parameters.values():
                p.grad = torch.ones_like(p)
        reducer.reduce()
        return {name: p.grad for name, p in reducer.parameters.items()}

    got = same(results(on_every_rank(body, 2, [r.peers for r in group])))
    assert all(torch.equal(g, torch.full_like(g, 0.5)) for g in got.values())


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shapes", [[(8, 4), (4,)], [(3,)], [()], [(0,), (2, 0)], [(80, 64)]])
def test_models_of_few_tensors(shapes, ranks):
    def body(peers):
        own = {str(i): nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
        reducer = GradientReducer(own, "int4", peers)
        for p in own.values():
            p.grad = torch.full_like(p, peers.rank + 1.0)
        reducer.reduce()
        return [p.grad for p in own.values()]

    for gradients in results(on_every_rank(body, ranks)):
        for g in gradients:
            torch.testing.assert_close(g, torch.full_like(g, (ranks + 1) / 2), rtol=0, atol=0.3)


def test_traffic_is_what_travelled_in_the_last_step():
    peers = [Counting(p) for p in Loopback.ranks(3, TIMEOUT_S)]
    group = results(on_every_rank(lambda p: GradientReducer(parameters(), "ef(topk:0.05)", p), 3, peers))
    for step in range(2):
        for p in peers:
            p.sent.clear()
            p.received.clear()
        results(reduce(group, step))
        for reducer, p in zip(group, peers, strict=True):
            assert reducer.traffic.sent_bytes == sum(p.sent) > 0
            assert reducer.traffic.received_bytes == sum(p.received)
            numel = sum(p.numel() for p in reducer.parameters.values())
            assert abs(reducer.traffic.dense_sent_bytes - 2 * 2 * 4 * numel / 3) <= 2
    before = group[0].traffic
    group[0].state_dict()
    assert group[0].traffic == before


def test_nothing_is_written_to_gradients_after_a_bucket_has_failed():
    """The small section of a bucket fails while the large one is under way: the caller may use its tensors by then."""
    large = Gate({9})  # the second stage of a step's first section
    peers = [Counting(p, gate=large) for p in Loopback.ranks(3, TIMEOUT_S)]
    own = {name: p for name, p in parameters().items() if name in ("a", "bias")}
    group = results(on_every_rank(lambda p: GradientReducer(own, "int4", p), 3, peers))
    written = threading.Barrier(3)

    def body(peers):
        reducer = group[peers.rank]
        gradients = [gradients_of(peers.rank, 0)[n] for n in own]
        if peers.rank == 1:
            gradients[1][3] = torch.nan
        done = reducer.start(list(own), gradients, last=True)
        early = wait([done], timeout=3).done  # not done is right: all of the bucket has yet to arrive
        for g in gradients if early else ():
            g.fill_(5.0)
        written.wait(TIMEOUT_S)
        large.open.set()
        assert isinstance(done.exception(TIMEOUT_S), NonFiniteError)
        for future in reducer._now.results:
            future.exception(TIMEOUT_S)
        written.wait(TIMEOUT_S)
        time.sleep(0.2)
        return not early or all(bool((g == 5.0).all()) for g in gradients)

    assert results(on_every_rank(body, 3, peers)) == [True] * 3


@pytest.mark.parametrize("name", ["a", "bias"])
def test_means_that_cannot_be_written_are_an_error_not_a_wait(name):
    """Callbacks of futures drop errors: the bucket would never be done."""
    reducer = GradientReducer(parameters(), "int4", Alone())
    gradients = {n: torch.zeros(1).expand(SHAPES[n]) if n == name else torch.zeros(SHAPES[n]) for n in SHAPES}
    done = reducer.start(list(gradients), list(gradients.values()), last=True)
    with pytest.raises(RuntimeError, match="written-to tensor"):
        done.result(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="written-to tensor"):  # the ranks are no longer in step
        reducer.reduce()


def test_an_error_in_a_bucket_ends_those_before_it():
    """Their small tensors travel with the last bucket, which never comes."""
    reducer = GradientReducer(parameters(), "int4", Alone())
    first = reducer.start(["norm", "a"], [torch.ones(100), torch.ones(80, 64)], last=False)
    reducer.on_gradient.append(lambda name, gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        reducer.start(["bias", "b"], [torch.ones(64), torch.ones(64, 100)], last=True)
    with pytest.raises(ZeroDivisionError):
        first.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("mine", "words"),
    [
        ({"what": "int8"}, "codec int8"),
        ({"seed": 1}, "seed 1"),
        ({"nonfinite": "propagate"}, "nonfinite propagate"),
        ({"hosts": (0, 0, 0)}, "codec ef(topk:0.05), hierarchical, "),
        ({"feedback": False}, "codec topk:0.05, "),
        ({"parameters": {"a": nn.Parameter(torch.zeros(3))}}, "1 parameters"),
    ],
)
def test_ranks_that_differ_are_named(mine, words):
    def body(peers):
        settings = {"parameters": parameters(), "what": "topk:0.05", **(mine if peers.rank == 2 else {})}
        return GradientReducer(settings.pop("parameters"), settings.pop("what"), peers, **settings)

    for error in on_every_rank(body, 3):
        assert isinstance(error, PeerError)
        assert str(error).startswith("rank 2 has ")
        assert words in str(error)


def test_a_state_is_saved_between_steps():
    reducer = GradientReducer(parameters(), "int4", Alone())
    g = [torch.zeros(80, 64)]
    reducer.start(["a"], g, last=False)
    with pytest.raises(ConfigError, match="between steps"):
        reducer.state_dict()


def test_bad_arguments():
    with pytest.raises(ConfigError, match="`nonfinite` must be 'raise' or 'propagate'; got 'ignore'"):
        GradientReducer(parameters(), "int4", Alone(), nonfinite="ignore")
    with pytest.raises(ConfigError, match=r"unknown codec 'nope'.* Or 'dense', 'powersgd:RANK' and 'acp:RANK'\.$"):
        GradientReducer(parameters(), "nope", Alone())
    for seed in (-1, 1 << 64, 0.5, "1"):
        with pytest.raises(ConfigError, match=r"`seed` must be a whole number in \[0, 2\*\*64\); got"):
            GradientReducer(parameters(), "int4", Alone(), seed=seed)
    assert gradwire.compress is not None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("then", ["int4", "dense", "ef(topk:0.05)", "powersgd:2,start=0+int8", "none"])
@pytest.mark.parametrize("first", ["ef(sign)", "ef(topk:0.05)", "powersgd:2,start=0"])
def test_another_method_loses_nothing(first, then, ranks):
    """What was sent by two methods, and at last exactly, is all there was."""
    group = reducers(first, ranks)
    sent = [reduce(group, 0), reduce(group, 1)]
    for reducer in group:
        reducer.assign(dict.fromkeys(SHAPES, then))
    sent += [reduce(group, 2)]
    for reducer in group:
        reducer.assign(dict.fromkeys(SHAPES, "none"))
    sent += [reduce(group, 3), reduce(group, 4)]
    for name in SHAPES:
        total = sum(results(each)[0][name].double() for each in sent)
        no_feedback = then == "int4" or ("powersgd" in first + then and name == "d")  # a vector in all but name: int8
        lost = 0.1 if no_feedback and name in LARGE else 1e-5
        torch.testing.assert_close(total, sum(true_mean(ranks, s, name) for s in range(5)), rtol=0, atol=5 * lost)


@pytest.mark.parametrize(("ranks", "then"), [(3, 2), (2, 3), (1, 2), (2, 1)])
@pytest.mark.parametrize("what", ["ef(sign)", "ef(topk:0.05)", "powersgd:2,start=0"])
def test_another_number_of_ranks_loses_nothing(what, ranks, then):
    """What some ranks had kept back is sent by those that come after them."""
    before, after = reducers(what, ranks), reducers(what, then)
    sent = [reduce(before, 0), reduce(before, 1)]
    states = state_dicts(before)
    for reducer in after:
        reducer.load_state_dict(states)
        assert reducer.state_dict()["step"] == 2
    sent += [reduce(after, 2)]
    for reducer in after:
        reducer.assign(dict.fromkeys(SHAPES, "none"))
    sent += [reduce(after, 3), reduce(after, 4)]
    for name in SHAPES:
        total = sum(results(each)[0][name].double() for each in sent)
        wanted = sum(true_mean(ranks if s < 2 else then, s, name) for s in range(5))
        no_feedback = "powersgd" in what and name == "d"  # a vector in all but name: int8
        lost = 0.1 if no_feedback and name in LARGE else 1e-5
        torch.testing.assert_close(total, wanted, rtol=0, atol=5 * lost)


def test_states_of_all_ranks_are_this_ranks_own_if_there_are_as_many():
    group = reducers("ef(topk:0.05)", 2)
    results(reduce(group, 0))
    states = state_dicts(group)
    again = reducers("ef(topk:0.05)", 2)
    for reducer in again:
        reducer.load_state_dict(states)
    for mine, before in zip(state_dicts(again), states, strict=True):
        assert_equal(mine["states"], before["states"])


@pytest.mark.parametrize("pick", [[0], [1, 0], [0, 0], []])
def test_states_that_are_not_those_of_all_ranks_are_refused(pick):
    group = reducers("ef(topk:0.05)", 2)
    results(reduce(group, 0))
    states = state_dicts(group)
    (reducer,) = reducers("ef(topk:0.05)", 1)
    with pytest.raises(ConfigError, match="`state` must have the states of all ranks that were saved, in order; got"):
        reducer.load_state_dict([states[each] for each in pick])


def test_parameters_of_a_bucket_may_travel_by_different_methods():
    mixed = {"a": "dense", "b": "powersgd:2,start=0", "c": "int8", "d": "ef(topk:0.5)"}
    group = reducers("none", 3)
    for reducer in group:
        reducer.assign(mixed)
        assert {name: reducer.methods[name] for name in mixed} == mixed
    means = results(reduce(group, 0))
    for name in SHAPES:
        assert all(torch.equal(means[0][name], each[name]) for each in means)
        exact = torch.allclose(means[0][name].double(), true_mean(3, 0, name), atol=1e-6)
        assert exact == (name not in ("b", "c", "d")), name


def test_what_a_failed_step_carried_is_carried_again():
    group = reducers("ef(topk:0.05)", 2)
    first = results(reduce(group, 0))[0]
    for reducer in group:
        reducer.assign(dict.fromkeys(SHAPES, "none"))
    assert all(isinstance(each, NonFiniteError) for each in reduce(group, 1, bad=1))
    second = results(reduce(group, 2))[0]
    for name in SHAPES:
        torch.testing.assert_close(
            first[name].double() + second[name].double(),
            true_mean(2, 0, name) + true_mean(2, 2, name),
            atol=1e-5,
            rtol=0,
        )


@pytest.mark.parametrize("steps_before_saving", [1, 2])
def test_what_is_assigned_and_carried_is_saved(steps_before_saving):
    def assigned():
        group = reducers("ef(topk:0.05)", 2)
        reduce(group, 0)
        for reducer in group:
            reducer.assign({"a": "int4", "b": "powersgd:2,start=0"})
        return group

    group, other = assigned(), reducers("ef(topk:0.05)", 2)
    for step in range(1, steps_before_saving):
        reduce(group, step)
    for reducer, copied in zip(group, other, strict=True):
        copied.load_state_dict(reducer.state_dict())
        assert copied.methods == reducer.methods
    for step in (3, 4):
        one, two = results(reduce(group, step)), results(reduce(other, step))
        assert all(torch.equal(a[n], b[n]) for a, b in zip(one, two, strict=True) for n in SHAPES)


def test_between_is_called_before_every_step_with_how_the_last_one_went():
    (reducer,) = reducers("int4", 1)
    seen = []
    reducer.between = lambda step, times: seen.append((step, times))
    for step in range(4):
        reduce([reducer], step)
        if step == 1:
            reducer.state_dict()  # which looks at the step before the next one does
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert [times is None for _, times in seen] == [True, True, False, False]
    times = seen[-1][1]
    assert times.step == 2
    assert [bucket.names for bucket in times.buckets] == [tuple(SHAPES)]
    assert 0 < times.buckets[0].ready_s < times.buckets[0].done_s == times.seconds


def test_assign_refuses_what_it_does_not_know():
    (reducer,) = reducers("int4", 1)
    with pytest.raises(ConfigError, match=r"`methods` must be of the reducer's parameters; got \['nobody'\]"):
        reducer.assign({"nobody": "int4"})
    with pytest.raises(ConfigError, match="unknown codec"):
        reducer.assign({"a": "int5"})


def test_a_step_lets_go_of_its_tensors_at_once():
    """Residuals as large as the model must not wait for Python to look for cycles."""
    (reducer,) = reducers("ef(topk:0.05)", 1)
    gc.disable()
    try:
        reduce([reducer], 0)
        step, state = weakref.ref(reducer._now), weakref.ref(reducer._now.results[0].result().state["residual"])
        reduce([reducer], 1)
        reduce([reducer], 2)
        assert step() is None
        assert state() is None
    finally:
        gc.enable()


def test_of_several_failed_parts_the_first_started_is_told_whichever_failed_first():
    """Backends complete in any order: ranks would name different buckets."""
    first, later = NonFiniteError("first"), NonFiniteError("later")
    countdown = _Countdown(3, lambda: None)
    for place, error in ((2, later), (0, first), (1, None)):
        countdown(place, error)
    assert countdown.done.exception() is first
