"""Optimizers that talk less often: their laws between threads, and what they promise between real processes."""

import copy
import json
import time

import pytest
import torch
from torch import nn

from gradwire import ConfigError, DeMo, DiLoCo, LocalAccumulation, LocalSGD, NonFiniteError, PeerError
from gradwire.collectives.loopback import Alone, Loopback
from gradwire.optim.decoupled_momentum import cosines
from gradwire.optim.local_update import _Schedule
from gradwire.tree import equal, from_bytes, to_bytes
from tests.case import tiered
from tests.collectives.threads import on_every_rank, results
from tests.workers import elastic
from tests.workers.ddp import Net, batch, loss_of
from tests.workers.group import Group
from tests.workers.ranks import Cases, same_on_every_rank, without_error

pytestmark = pytest.mark.timeout(300)

CODECS = ("none", "dense", "int8", "int4", "topk:0.03+int2", "sign", "qsgd:16", "ef21(int4)", "powersgd:4+int8")
KINDS = {
    "accumulation": {"kind": "accumulation", "optimizer": "adamw", "every": 2},
    "local": {"kind": "local"},
    "post-local": {"kind": "local", "synchronous_steps": 5, "synchronous_codec": "powersgd:4,start=2+int8"},
    "post-local dense": {"kind": "local", "synchronous_steps": 3, "synchronous_codec": "dense"},
    "diloco": {"kind": "diloco", "optimizer": "adamw"},
    "streaming": {"kind": "diloco", "optimizer": "adamw", "every": 6, "fragments": 3},
    "overlapping": {"kind": "diloco", "every": 4, "fragments": 2, "overlap": 2, "codec": "topk:0.1+int4"},
    "sparse": {"kind": "diloco", "codec": "topk:0.03+int2"},
    "demo": {"kind": "demo"},
    "demo exact": {"kind": "demo", "values": "none", "density": 0.1, "weight_decay": 0.01},
}


def cases(ranks):
    found = {}
    for name, how in KINDS.items():
        found["trained", name] = ("trained", {"steps": 30, **how})
        found["resumed", name] = ("resumed", {"at": 7, **how})
        found["nonfinite", name] = ("nonfinite", how)
    for codec in CODECS:
        found["codec", codec] = ("trained", {"kind": "diloco", "every": 2, "steps": 8, "codec": codec})
    for codec in ("topk:0.1", "qsgd:16", "powersgd:4,start=1+int8"):
        found["resumed", codec] = ("resumed", {"kind": "local", "at": 6, "codec": codec})
        found["resumed accumulation", codec] = ("resumed", {"kind": "accumulation", "at": 6, "codec": codec})
    for kind in ("local", "accumulation"):
        found["ddp", kind] = ("like_ddp", {"kind": kind, "every": 1, "codec": "none"})
    found["ddp", "synchronous"] = ("like_ddp", {"kind": "local", "synchronous_steps": 20, "synchronous_codec": "none"})
    found["different"] = ("different", {"kind": "local"})
    found["scheduled"] = ("scheduled", {})
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with Cases(tmp_path_factory.mktemp("two"), cases(2), 2, "tests.workers.local") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    with Cases(tmp_path_factory.mktemp("three"), cases(3), 3, "tests.workers.local") as ranks:
        yield ranks


@pytest.fixture(params=tiered([2, 3], first=[2]))
def told(request):
    return request.getfixturevalue({2: "two", 3: "three"}[request.param])


# Between processes.


@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_agree_on_is_the_same_to_the_bit_after_every_round(told, kind):
    for rank in same_on_every_rank(told["trained", kind], "agreed", "round", "steps"):
        assert rank["round"] > 0
        assert len(set(rank["agreed"])) == len(rank["agreed"])
        assert sum(rank["losses"][-4:]) < sum(rank["losses"][:4])


@pytest.mark.parametrize("codec", CODECS)
def test_in_every_codec(told, codec):
    answers = same_on_every_rank(told["codec", codec], "agreed")
    assert len(answers[0]["agreed"]) == 4


def test_it_sends_less_than_ddp_by_as_much_as_it_should(two):
    for rank in without_error(two["codec", "int8"]):
        last, sent, dense = rank["traffic"]
        assert sent == 4 * last
        assert 0.125 < sent / dense < 0.16  # a quarter of the bytes, every second step; and small tensors as they are


@pytest.mark.parametrize("kind", ["local", "accumulation", "synchronous"])
def test_with_an_exchange_after_every_step_it_is_ddp(told, kind):
    """Up to the order of sums, and the rounding of differences."""
    for rank in same_on_every_rank(told["ddp", kind]):
        assert rank["distance"] < 1e-6


@pytest.mark.parametrize("kind", [*KINDS, "topk:0.1", "qsgd:16", "powersgd:4,start=1+int8"])
def test_going_on_in_the_middle_of_a_round_changes_no_bit(told, kind):
    for rank in without_error(told["resumed", kind]):
        assert rank["found"] == rank["expected"]
        assert rank["counters"]


@pytest.mark.parametrize("codec", ["topk:0.1", "qsgd:16", "powersgd:4,start=1+int8"])
def test_nor_does_it_in_the_middle_of_an_accumulation(told, codec):
    for rank in without_error(told["resumed accumulation", codec]):
        assert rank["found"] == rank["expected"]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_on_one_rank_raises_on_all_in_the_same_round_and_changes_nothing(told, kind):
    for rank in same_on_every_rank(told["nonfinite", kind], "agreed", "round", "steps"):
        assert "NaN or Inf on ranks [1]" in rank["said"] or "dense" in kind
        assert rank["unchanged"]
        assert sum(rank["losses"][-4:]) < sum(rank["losses"][:4])


def test_ranks_with_other_settings_are_told(told):
    for rank in told["different"]:
        assert "every=4" in rank["said"]
        assert "every=5" in rank["said"]


def test_schedulers_and_closures_work(told):
    for rank in without_error(told["scheduled"]):
        assert rank["rate"] == 0.125
        assert rank["shared"]


# Ranks that die and come.


HOWS = {
    "between": {"die": "at once", "how": {"codec": "int4"}},
    "exchange": {"die": "exchange", "after_s": 0.002, "how": {"codec": "topk:0.1"}},
    "overlap": {"die": "exchange", "how": {"codec": "int4", "fragments": 2, "overlap": 1}},
}


@pytest.mark.parametrize("how", tiered(HOWS, first=["exchange"]))
def test_ranks_are_killed_and_join_and_all_end_with_the_same_bits(tmp_path, how):
    """Of three ranks one is killed by SIGKILL, two go on, a third joins later with weights of its own."""
    with Group(elastic.live, tmp_path, 4, **HOWS[how]) as group:
        end = time.monotonic() + 90
        while any(group.ranks[rank].is_alive() for rank in (0, 2, 3)):
            assert time.monotonic() < end, [group.said(rank) for rank in range(4)]
            time.sleep(0.02)
        assert group.ranks[1].exitcode == -9
        files = [tmp_path / f"result-{rank}" for rank in (0, 2, 3)]
        assert all(file.exists() for file in files), [group.said(rank) for rank in range(4)]
        found = [json.loads(file.read_text()) for file in files]
    for name in ("agreed", "parameters", "round", "steps"):
        assert len({rank[name] for rank in found}) == 1, [rank[name] for rank in found]
    for rank in found[:2]:
        assert len(rank["faults"]) == 1
        assert "rank 1 is gone" in rank["faults"][0]
        assert rank["kept"]
        assert sum(rank["losses"][-4:]) < 0.9 * sum(rank["losses"][:4])
    # What is under way when ranks meet anew is a round, too.
    assert found[2]["joined_at"] - elastic.times(HOWS[how], elastic.JOINED) in (0, 1)


# Laws, between threads.


def steps_of(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        x, target = (each.to(next(model.parameters()).device) for each in batch(step, rank))
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()


def sgd(model, lr=0.05, momentum=0.9):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def trained(make, ranks, steps, inner=sgd):
    """The models of all ranks after so many steps; ``make(optimizer, peers)`` wraps."""
    models = [Net() for _ in range(ranks)]

    def body(peers):
        model = models[peers.rank]
        optimizer = make(inner(model), peers)
        steps_of(model, optimizer, peers.rank, range(steps))
        return optimizer

    optimizers = results(on_every_rank(body, ranks))
    return models, optimizers


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def test_one_rank_alone_is_the_plain_optimizer():
    """Up to rounding: a + (b - a) is b only if they are of one magnitude."""
    plain, ours = Net(), Net()
    steps_of(plain, sgd(plain), 0, range(20))
    steps_of(ours, LocalSGD(sgd(ours), every=5, codec="none", group=Alone()), 0, range(20))
    torch.testing.assert_close(flat(ours), flat(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("codec", ["none", "int4", "topk:0.1"])
def test_diloco_without_outer_momentum_is_local_sgd(codec):
    one, _ = trained(lambda o, peers: LocalSGD(o, every=3, codec=codec, group=peers), 3, 9)
    how = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "fragments": 1, "overlap": 0}
    two, _ = trained(lambda o, peers: DiLoCo(o, every=3, codec=codec, group=peers, **how), 3, 9)
    assert torch.equal(flat(one[0]), flat(two[0]))


def reference(ranks, steps, every, fragments=1, overlap=0, mixing=0.0):
    """Streaming DiLoCo on replicas side by side, as the paper has it."""
    replicas, agreed = [Net() for _ in range(ranks)], Net()
    inner, outer = [sgd(model) for model in replicas], torch.optim.SGD(
        agreed.parameters(), lr=0.7, momentum=0.9, nesterov=True
    )  # fmt: skip
    together, flying = list(zip(agreed.parameters(), *(m.parameters() for m in replicas), strict=True)), {}
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            steps_of(model, optimizer, rank, [step - 1])
        for fragment in range(fragments):
            if (step - (fragment + 1) * every // fragments) % every == 0:
                flying[step + overlap] = (
                    fragment,
                    [a - torch.stack(ps).mean(0) for a, *ps in together[fragment::fragments]],
                )
        if step in flying:
            fragment, gradients = flying.pop(step)
            outer.zero_grad()
            for (a, *_), gradient in zip(together[fragment::fragments], gradients, strict=True):
                a.grad = gradient.detach()
            outer.step()
            with torch.no_grad():
                for a, *ps in together[fragment::fragments]:
                    for p in ps:
                        p.copy_(mixing * p + (1 - mixing) * a)
    return agreed, replicas


@pytest.mark.parametrize(
    "how",
    [{}, {"fragments": 1, "overlap": 0}, {"fragments": 2}, {"fragments": 3, "overlap": 2, "mixing": 0.25}],
)
def test_diloco_is_what_its_paper_says(how):
    models, optimizers = trained(lambda o, peers: DiLoCo(o, every=6, codec="none", group=peers, **how), 2, 25)
    agreed, replicas = reference(2, 25, 6, **how)
    torch.testing.assert_close(torch.cat([a.view(-1) for a in optimizers[0].agreed]), flat(agreed), rtol=0, atol=3e-6)
    for model, replica in zip(models, replicas, strict=True):
        torch.testing.assert_close(flat(model), flat(replica), rtol=0, atol=3e-6)


def test_fragments_take_turns_evenly():
    turns = [_Schedule(every=6, synchronous_steps=2, fragments=3).due(steps) for steps in range(3, 15)]
    assert turns == [[], [0], [], [1], [], [2]] * 2


def pushed(make, ranks, rounds, seed=0):
    """Ranks that push known gradients into SGD of rate 1: parameters, optimizers, and the mean of what was pushed."""
    generator = torch.Generator().manual_seed(seed)
    gradients = torch.randn(rounds, ranks, 80, 80, generator=generator)
    weights = [nn.Parameter(torch.zeros(80, 80)) for _ in range(ranks)]

    def body(peers):
        weight = weights[peers.rank]
        optimizer = make(torch.optim.SGD([weight], lr=1.0), peers)
        for each in gradients[:, peers.rank]:
            weight.grad = each.clone()
            optimizer.step()
        return optimizer

    return weights, results(on_every_rank(body, ranks)), -gradients.mean(1).sum(0)


def left(optimizers, exchange):
    """What all ranks have not sent, as it would move the mean."""
    total = torch.zeros(6400)
    for optimizer in optimizers:
        state = optimizer.state_dict()["exchanges"][exchange]
        for each in state["reducer"]["states"].values():
            total += each["residual"].view(-1) / len(optimizers)
            if "owned" in each:
                total[each["owned_from"] : each["owned_from"] + len(each["owned"])] += each["owned"]
        for each in state["kept"].values():
            total += each["own"] / len(optimizers) + each["mean"]
    return total.view(80, 80)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("codec", ["topk:0.02+int4", "sign", "powersgd:2,start=0+int8"])
def test_error_feedback_loses_nothing(codec, ranks):
    _, optimizers, total = pushed(lambda o, peers: LocalSGD(o, every=1, codec=codec, group=peers), ranks, 6)
    rest = left(optimizers, "differences")
    assert rest.norm() > 0.1 * total.norm()
    torch.testing.assert_close(optimizers[0].agreed[0] + rest, total, rtol=0, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", [LocalSGD, LocalAccumulation])
def test_flush_sends_all_that_was_kept_back(kind, ranks):
    def make(inner, peers):
        return kind(inner, every=1, codec="topk:0.02", group=peers)

    weights, optimizers, total = pushed(make, ranks, 5)
    results(on_every_rank(lambda peers: optimizers[peers.rank].flush(), ranks, [o.peers for o in optimizers]))
    for weight in weights:
        torch.testing.assert_close(weight.detach(), total, rtol=0, atol=1e-4)
        assert torch.equal(weight, weights[0])


@pytest.mark.parametrize("before", [2, 3])
def test_another_number_of_ranks_goes_on_and_loses_nothing(before):
    def make(inner, peers):
        return LocalSGD(inner, every=1, codec="topk:0.02", group=peers)

    _, optimizers, total = pushed(make, before, 5)
    states = [from_bytes(to_bytes(optimizer.state_dict())) for optimizer in optimizers]
    weights = [nn.Parameter(torch.ones(80, 80)) for _ in range(5 - before)]

    def body(peers):
        optimizer = make(torch.optim.SGD([weights[peers.rank]], lr=1.0), peers)
        optimizer.load_state_dict(states)
        optimizer.flush()
        return optimizer.round

    assert results(on_every_rank(body, 5 - before)) == [6] * (5 - before)
    for weight in weights:
        torch.testing.assert_close(weight.detach(), total, rtol=0, atol=1e-4)


def test_ranks_that_change_take_what_they_have_not_sent_along():
    """Three become two, without a failure; what two ranks kept back counts by their new number."""

    def make(inner, peers):
        return LocalSGD(inner, every=1, codec="topk:0.02", group=peers)

    _, optimizers, _ = pushed(make, 3, 5)
    agreed = optimizers[0].agreed[0]
    states = [
        optimizer.state_dict()["exchanges"]["differences"]["reducer"]["states"]["0"] for optimizer in optimizers[:2]
    ]
    kept = sum(each["residual"] for each in states) / 2
    for each in states:
        kept[each["owned_from"] : each["owned_from"] + len(each["owned"])] += each["owned"]

    def body(peers):
        optimizers[peers.rank].regroup(peers)
        optimizers[peers.rank].flush()

    results(on_every_rank(body, 2))
    torch.testing.assert_close(optimizers[0].agreed[0], agreed + kept.view(80, 80), rtol=0, atol=1e-4)


def test_a_state_within_a_round_is_of_its_ranks_only():
    model = Net()
    optimizer = LocalSGD(sgd(model), every=4, group=Alone())
    steps_of(model, optimizer, 0, range(2))
    state = optimizer.state_dict()

    def body(peers):
        other = LocalSGD(sgd(Net()), every=4, group=peers)
        with pytest.raises(ConfigError, match=r"within a round by rank 0 of 1; this is rank \d of 2"):
            other.load_state_dict(state)

    results(on_every_rank(body, 2))
    with pytest.raises(ConfigError, match="kind 'LocalSGD'"):
        DiLoCo(sgd(Net()), every=4, group=Alone()).load_state_dict(state)
    with pytest.raises(ConfigError, match="must come from state_dict"):
        optimizer.load_state_dict({"x": 1})


def test_states_of_several_ranks_are_each_ones_and_of_one_round():
    def states_after(steps):
        def body(peers):
            model = Net()
            optimizer = LocalSGD(sgd(model), every=1, group=peers)
            steps_of(model, optimizer, peers.rank, range(steps))
            return optimizer.state_dict()

        return results(on_every_rank(body, 2))

    early, late = states_after(1), states_after(2)
    one = LocalSGD(sgd(Net()), every=1, group=Alone())
    with pytest.raises(ConfigError, match=r"the state of every rank that was saved once; got ranks \[0, 0\]"):
        one.load_state_dict([late[0], late[0]])
    with pytest.raises(ConfigError, match=r"states of one round; got those of rounds \[1, 2\]"):
        one.load_state_dict([late[0], early[1]])
    with pytest.raises(ConfigError, match=r"the states of all 3 ranks that were saved, or of one; got ranks \[0, 1\]"):
        one.load_state_dict([{**each, "ranks": 3} for each in late])
    with pytest.raises(ConfigError, match=r"got some of \[1, 2\] ranks"):
        one.load_state_dict([late[0], one.state_dict() | {"rank": 1}])
    one.load_state_dict(late)
    assert one.round == 2


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda inner, peers: LocalSGD(inner(0.1 * (1 + peers.rank)), every=2, group=peers), "'lr=0.2'{}'lr=0.1'"),
        (lambda inner, peers: DiLoCo(inner(), every=2 + peers.rank, group=peers), "'every=3'{}'every=2'"),
        (lambda inner, peers: LocalAccumulation(inner(), 2 + peers.rank, group=peers), "'every=3'{}'every=2'"),
        (lambda inner, peers: DeMo(Net().parameters(), lr=0.1 * (1 + peers.rank), group=peers), "'lr=0.2'{}'lr=0.1'"),
    ],
)
def test_ranks_whose_settings_differ_are_told_which(make, difference):
    def inner(lr=1e-3):
        return torch.optim.AdamW(Net().parameters(), lr=lr)

    for error in on_every_rank(lambda peers: make(inner, peers), 2):
        assert f"The difference: {difference.format(' instead of ')}." in str(error)


WRAPPERS = {
    "localsgd": lambda inner, peers: LocalSGD(inner, every=2, codec="ef(int2)", group=peers),
    "diloco": lambda inner, peers: DiLoCo(inner, every=2, fragments=2, overlap=1, group=peers),
    "accumulation": lambda inner, peers: LocalAccumulation(inner, every=2, group=peers),
    "demo": lambda inner, peers: DeMo(inner.param_groups[0]["params"], lr=0.01, group=peers),
}


@pytest.mark.parametrize("flushes", [True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_state_of_one_rank_is_enough_for_all_of_as_many(kind, flushes):
    def before(peers):
        model = Net()
        optimizer = WRAPPERS[kind](sgd(model), peers)
        steps_of(model, optimizer, peers.rank, range(4))
        if flushes and hasattr(optimizer, "flush"):
            optimizer.flush()
        elif hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        return to_bytes(optimizer.state_dict())

    saved = results(on_every_rank(before, 2))

    def after(peers):
        model = Net()
        optimizer = WRAPPERS[kind](sgd(model), peers)
        optimizer.load_state_dict(from_bytes(saved[0]))
        steps_of(model, optimizer, peers.rank, range(4, 8))
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        return flat(model)

    one, other = results(on_every_rank(after, 2))
    assert torch.equal(one, other)
    assert one.isfinite().all()


def test_a_state_that_one_rank_cannot_take_is_an_error_on_all():
    def body(peers):
        optimizer = LocalSGD(sgd(Net()), every=2, group=peers)
        state = optimizer.state_dict()
        optimizer.load_state_dict(state if peers.rank != 1 else {**state, "kind": "DiLoCo"})

    errors = on_every_rank(body, 3)
    assert "kind 'DiLoCo'" in str(errors[1])
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerError)
        assert "rank 1 cannot take the state it was given: `state_dict` has kind 'DiLoCo'" in str(errors[rank])


def test_accumulation_is_one_large_batch():
    models, _ = trained(lambda o, peers: LocalAccumulation(o, every=4, codec="none", group=peers), 2, 8)
    large = Net()
    optimizer = sgd(large)
    for first in (0, 4):
        optimizer.zero_grad()
        for step in range(first, first + 4):
            for rank in range(2):
                (loss_of(large, step, rank) / 8).backward()
        optimizer.step()
    torch.testing.assert_close(flat(models[0]), flat(large), rtol=0, atol=1e-6)
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_a_newcomer_counts_for_nothing_even_as_the_first_rank():
    models = [Net(), Net()]
    with torch.no_grad():
        models[0].layers[0].weight.fill_(7.0)

    def body(peers):
        optimizer = DiLoCo(sgd(models[peers.rank]), every=4, group=peers, join=peers.rank == 0)
        return optimizer.agreed

    agreed = results(on_every_rank(body, 2))
    assert torch.equal(agreed[0][0], Net().layers[0].weight)
    assert torch.equal(models[0].layers[0].weight, models[1].layers[0].weight)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo, LocalAccumulation])
def test_the_highest_round_wins_and_what_it_holds_is_not_counted_twice(kind):
    """One of two has the result of a round that failed on the other, whose work is part of it."""
    models = [Net(), Net()]

    def make(rank, peers):
        return kind(sgd(models[rank]), every=2, codec="topk:0.1", group=peers)

    optimizers = [make(0, Alone()), make(1, Alone())]
    steps_of(models[0], optimizers[0], 0, range(1))
    steps_of(models[1], optimizers[1], 1, range(2))
    expected = flat(models[1])

    def body(peers):
        optimizers[peers.rank].regroup(peers)
        assert (optimizers[peers.rank].round, optimizers[peers.rank].steps) == (1, 2)
        return flat(models[peers.rank])

    for found in results(on_every_rank(body, 2)):
        assert torch.equal(found, expected)


def test_demo_takes_newcomers():
    models = [Net(), Net()]
    members = [DeMo(models[0].parameters(), lr=0.01, group=Alone())]
    steps_of(models[0], members[0], 0, range(3))

    def body(peers):
        if peers.rank:
            members[0].regroup(peers)
            optimizer, model = members[0], models[0]
        else:
            optimizer, model = DeMo(models[1].parameters(), lr=0.01, group=peers, join=True), models[1]
        steps_of(model, optimizer, peers.rank, range(3, 6))
        return optimizer.round

    assert results(on_every_rank(body, 2)) == [6, 6]
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_rounding_to_bfloat16_is_nobodys_work():
    """Agreed parameters are float32; a rank that does nothing moves them nowhere."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(100, 100).to(torch.bfloat16))
    optimizer = DiLoCo(torch.optim.SGD([weight], lr=0.0), every=1, codec="none", group=Alone())
    optimizer._agreed["0"].add_(1e-4)
    before = optimizer.agreed[0]
    optimizer.rollback()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert torch.equal(optimizer.agreed[0], before)
    assert weight.dtype == torch.bfloat16


def paper_demo(gradients, lr, decay, density, chunk):
    """DeMo of its paper, in one dimension, without quantized values: ranks side by side."""
    _, ranks, numel = gradients.shape
    matrix, weight = cosines(chunk).float(), torch.zeros(numel)
    momenta = torch.zeros(ranks, numel)
    for each in gradients:
        momenta = decay * momenta + each
        frequencies = momenta.view(ranks, -1, chunk) @ matrix.t()
        top = frequencies.abs().topk(round(density * chunk), dim=-1).indices
        sent = torch.zeros_like(frequencies).scatter(-1, top, frequencies.gather(-1, top))
        momenta -= (sent @ matrix).view(ranks, numel)
        weight -= lr * (sent.mean(0).double() @ matrix.double()).sign().float().view(-1)
    return weight


def test_demo_is_what_its_paper_says():
    gradients = torch.randn(6, 3, 1024, generator=torch.Generator().manual_seed(1))
    weights = [nn.Parameter(torch.zeros(32, 32)) for _ in range(3)]

    def body(peers):
        how = {"lr": 0.01, "decay": 0.9, "density": 0.125, "chunk": 64, "values": "none", "group": peers}
        optimizer = DeMo([weights[peers.rank]], **how)
        for each in gradients[:, peers.rank]:
            weights[peers.rank].grad = each.view(32, 32).clone()
            optimizer.step()

    results(on_every_rank(body, 3))
    expected = paper_demo(gradients, 0.01, 0.9, 0.125, 64)
    # A sign of what is nearly zero may differ.
    assert (weights[0].detach().view(-1) - expected).abs().gt(1e-6).float().mean() < 0.01
    assert torch.equal(weights[0], weights[2])


def test_demo_takes_tensors_of_any_shape_and_its_momentum_is_in_its_state():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.LazyLinear(7), nn.LayerNorm(7))

    one, two, x = model(), model(), torch.randn(4, 3, 8, 8)
    one(x), two(x)
    two.load_state_dict(one.state_dict())
    first = DeMo(one.parameters(), lr=0.01, chunk=32, group=Alone())

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

    train(one, first)
    saved = from_bytes(to_bytes(first.state_dict()))
    assert saved["exchanges"]["momentum"]["residual"].abs().sum() > 0
    second = DeMo(two.parameters(), lr=0.01, chunk=32, group=Alone())
    second.load_state_dict(saved)
    assert equal(second.state_dict(), saved)
    train(one, first)
    train(two, second)
    assert torch.equal(flat(one), flat(two))


def test_accumulated_nan_is_forgotten_by_all():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = LocalAccumulation(torch.optim.SGD([weight], lr=1.0), every=2, codec="none", group=Alone())
    for gradient in (1.0, float("nan"), 2.0, 4.0):
        weight.grad = torch.full((3,), gradient)
        if gradient != gradient:
            with pytest.raises(NonFiniteError):
                optimizer.step()
        else:
            optimizer.step()
    assert weight.tolist() == [-3.0] * 3


def inner():
    return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalAccumulation(inner(), every=0, group=Alone()), "`every` must be a whole number of 1"),
        (lambda: LocalSGD(inner(), every=2.5, group=Alone()), "`every` must be a whole number of 1 or more; got 2.5"),
        (lambda: LocalSGD(inner(), 2, synchronous_steps=-1, group=Alone()), "`synchronous_steps` must be"),
        (lambda: LocalSGD(inner(), 2, "int5000", group=Alone()), "int"),
        (lambda: LocalSGD(inner(), 2, seed=-1, group=Alone()), "`seed` must be a whole number from 0"),
        (lambda: LocalSGD(inner(), 2, group="all"), "`group` must be a process group"),
        (lambda: LocalSGD(inner(), 2), "torch.distributed is not initialized"),
        (lambda: LocalSGD(nn.Linear(1, 1), 2, group=Alone()), "`optimizer` must be a gradient-based"),
        (lambda: LocalSGD(LocalSGD(inner(), 2, group=Alone()), 2, group=Alone()), "Wrap it once"),
        (lambda: DiLoCo(inner(), 4, outer_momentum=1.0, group=Alone()), r"`outer_momentum` must be in \[0, 1\)"),
        (lambda: DiLoCo(inner(), 4, outer_learning_rate=0, group=Alone()), "`outer_learning_rate` must be above 0"),
        (lambda: DiLoCo(inner(), 4, fragments=5, group=Alone()), "`fragments` must be at most `every`, 4; got 5"),
        (lambda: DiLoCo(inner(), 4, fragments=2, overlap=3, group=Alone()), "`overlap` must be at most every / frag"),
        (lambda: DiLoCo(inner(), 4, mixing=1.0, group=Alone()), r"`mixing` must be in \[0, 1\); got 1.0"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3))], density=2.0, group=Alone()), r"`density` must be in \(0, 1\]"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3))], decay=0.0, group=Alone()), r"`decay` must be in \(0, 1\]"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3))], values="int77", group=Alone()), "`values` must be a codec such"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3))], chunk=8, group=Alone()), "`chunk` must be a whole"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3))], lr=-1.0, group=Alone()), "`lr` must be 0 or more"),
        (lambda: DeMo([nn.Parameter(torch.zeros(3).double())], group=Alone()), "must be float32, float16 or bfloat16"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_what_is_closed_or_complete_takes_nothing_more():
    optimizer = LocalSGD(inner(), 2, group=Alone())
    with pytest.raises(ConfigError, match="parameters cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(optimizer)
    optimizer.close()
    optimizer.close()
    with pytest.raises(ConfigError, match="close"):
        optimizer.step()


def test_a_round_that_failed_is_repeated_after_regroup():
    """Two ranks whose third never answers; their work stays, and takes part in the next exchange."""
    models = [Net() for _ in range(3)]
    lonely = Loopback.ranks(3, timeout_s=0.3)
    optimizers = {}

    def body(peers):
        optimizers[peers.rank] = LocalSGD(sgd(models[peers.rank]), every=2, codec="none", group=lonely[peers.rank])

    results(on_every_rank(body, 3))

    def go_on(peers):
        model, optimizer = models[peers.rank], optimizers[peers.rank]
        steps_of(model, optimizer, peers.rank, [0])
        with pytest.raises(RuntimeError, match="rank 2 sent nothing"):
            steps_of(model, optimizer, peers.rank, [1])
        before = flat(model)
        optimizer.regroup(peers)
        assert torch.equal(flat(model), before)
        assert optimizer.round == 0
        steps_of(model, optimizer, peers.rank, [2])
        assert optimizer.round == 1
        return before

    results(on_every_rank(go_on, 2))
    assert torch.equal(flat(models[0]), flat(models[1]))
    alone = [Net(), Net()]
    for rank, model in enumerate(alone):
        steps_of(model, sgd(model), rank, range(3))
    torch.testing.assert_close(flat(models[0]), (flat(alone[0]) + flat(alone[1])) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_optimizer_goes_back_to_what_it_was_on_any_device(ranks, device):
    makes = {
        "accumulation": lambda o, peers: LocalAccumulation(o, every=2, codec="topk:0.1", group=peers),
        "local": lambda o, peers: LocalSGD(o, every=2, codec="sign", synchronous_steps=2, group=peers),
        "diloco": lambda o, peers: DiLoCo(o, every=4, fragments=2, overlap=1, group=peers),
        "demo": lambda o, peers: DeMo(o.param_groups[0]["params"], lr=0.01, group=peers),
    }
    for make in makes.values():
        models = [Net().to(device) for _ in range(ranks)]

        def body(peers, make=make, models=models):
            model = models[peers.rank]
            optimizer = make(sgd(model), peers)
            steps_of(model, optimizer, peers.rank, range(7))
            state = from_bytes(to_bytes(optimizer.state_dict()))
            steps_of(model, optimizer, peers.rank, range(7, 13))
            if hasattr(optimizer, "flush"):
                optimizer.flush()
            expected = flat(model)
            optimizer.load_state_dict(state)
            steps_of(model, optimizer, peers.rank, range(7, 13))
            if hasattr(optimizer, "flush"):
                optimizer.flush()
            return expected, flat(model)

        found = results(on_every_rank(body, ranks))
        for expected, again in found:
            assert torch.equal(expected, again)
            assert torch.equal(expected, found[0][0])
