"""Dense inside a host and compressed between hosts; and torch's own all-reduce."""

import pytest
import torch

from gradwire import ConfigError, Key, NonFiniteError, PeerError, TensorSpec, codec
from gradwire.collectives import Dense, Hierarchical, LowRank, find_hosts, run
from gradwire.collectives.choose import flat_collective
from gradwire.collectives.loopback import Loopback
from gradwire.collectives.peers import Team

from .threads import TIMEOUT_S, Counting, on_every_rank, reduce_all, results, tensors

HOSTS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1, 1, 1), (0, 0, 1, 1, 2, 2), (0, 1, 2)]
NUMEL = 20_000


def ranks(hosts, what, peers=None):
    peers = peers or Loopback.ranks(len(hosts), TIMEOUT_S)
    return [Hierarchical(each, codec(what), hosts) for each in peers]


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("what", ["none", "int8", "int4", "ef(sign)", "ef(topk:0.1)"])
def test_every_rank_has_the_same_bits_and_they_are_the_mean(hosts, what):
    collectives, xs = ranks(hosts, what), tensors(len(hosts), NUMEL)
    states = [each.init(TensorSpec((NUMEL,))) for each in collectives]
    outcomes = results(reduce_all(collectives, xs, states))
    for outcome in outcomes:
        assert torch.equal(outcome.mean, outcomes[0].mean)
    if what in ("none", "int8"):
        torch.testing.assert_close(outcomes[0].mean, sum(xs) / len(xs), rtol=0, atol={"none": 1e-6, "int8": 0.05}[what])


def test_messages_of_a_team_are_told_apart_by_their_tags_and_errors_name_their_purpose():
    peers = Loopback.ranks(4, timeout_s=0.1)
    one, three = (Team.of(peers[rank], [1, 3]) for rank in (1, 3))
    for tag in (5, 6):
        one.swap({}, tag, "a test").send(1, torch.tensor([tag], dtype=torch.uint8))
    assert [int(three.swap({0: 1}, tag, "a test").receive(0)) for tag in (6, 5)] == [6, 5]
    with pytest.raises(PeerError, match="a test failed: rank 1 sent nothing"):
        three.swap({0: 1}, 7, "a test").receive(0)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("what", ["ef(sign)", "ef(topk:0.05+int8)"])
def test_feedback_loses_nothing_also_when_buckets_are_rebuilt(hosts, what):
    collectives, sizes = ranks(hosts, what), [NUMEL - 3000, 3000]
    states = [each.init(TensorSpec((NUMEL,))) for each in collectives]
    given = arrived = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        xs = tensors(len(hosts), NUMEL, seed=step)
        outcomes = results(reduce_all(collectives, xs, states, step, tag=8 * step))
        given, arrived = given + sum(x.double() for x in xs), arrived + len(hosts) * outcomes[0].mean.double()
        states = [outcome.state for outcome in outcomes]
        if step == 2:  # the tensors change places
            apart = [each.by_tensor(state, sizes)[::-1] for each, state in zip(collectives, states, strict=True)]
            states = [each.from_tensors(a, sizes[::-1]) for each, a in zip(collectives, apart, strict=True)]
            given, arrived = (torch.cat([total[sizes[0] :], total[: sizes[0]]]) for total in (given, arrived))
    left = sum(each.by_tensor(state, [NUMEL])[0]["residual"] for each, state in zip(collectives, states, strict=True))
    torch.testing.assert_close(arrived + left.double(), given, rtol=0, atol=1e-3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("hosts", HOSTS)
def test_all_ranks_raise_if_one_has_nan_or_inf(hosts, value):
    for place in (0, NUMEL - 1):
        collectives, xs = ranks(hosts, "int8"), tensors(len(hosts), NUMEL)
        xs[1][place] = value
        outcomes = reduce_all(collectives, xs, [{}] * len(hosts))
        assert all(isinstance(outcome, NonFiniteError) for outcome in outcomes), outcomes


def test_only_what_travels_between_hosts_is_compressed():
    hosts, between = (0, 0, 1, 1), []
    for rank, each in enumerate(Loopback.ranks(4, TIMEOUT_S)):
        between.append(Between(each, hosts, rank))
    results(reduce_all(ranks(hosts, "int8", between), tensors(4, NUMEL), [{}] * 4))
    # Two owners of half the tensor each exchange int8 with their counterpart.
    for each in between:
        assert 0.9 * NUMEL / 2 < sum(each.sent) < 1.1 * NUMEL / 2


class Between(Counting):
    """Counts what goes to other hosts."""

    def __init__(self, inner, hosts, rank):
        super().__init__(inner)
        object.__setattr__(self, "hosts", hosts)

    def swap(self, nbytes, tag, what):
        counted = super().swap(nbytes, tag, what)
        send, hosts, me = counted.send, self.hosts, self.rank

        def only_between(rank, data):
            (send if hosts[rank] != hosts[me] else counted.inner.send)(rank, data)

        counted.send = only_between
        return counted


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 0), (0, 1, 1, 1)])
def test_hosts_must_fit_the_ranks(hosts):
    with pytest.raises(ConfigError, match="`hosts` must name a host for each rank, with equally many ranks each"):
        Hierarchical(Loopback(0, 4 if hosts == (0, 0) else len(hosts)), codec("int8"), hosts)


def test_ranks_of_one_process_are_on_one_host():
    assert results(on_every_rank(find_hosts, 3)) == [(0, 0, 0)] * 3


@pytest.mark.parametrize("hosts", [(), (0, 1, 2, 3)])
def test_one_rank_a_host_needs_no_hierarchy(hosts):
    assert not isinstance(flat_collective(Loopback(0, 4), codec("int8"), hosts), Hierarchical)


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 0)])
def test_ranks_that_share_a_host_are_summed_there(hosts):
    assert isinstance(flat_collective(Loopback(0, 4), codec("int8"), hosts), Hierarchical)


def test_low_rank_factors_take_the_same_way():
    peers, shapes = Loopback.ranks(4, TIMEOUT_S), ((64, 300),)
    collectives = [LowRank(each, shapes, rank=4, start=0, hosts=(0, 0, 1, 1)) for each in peers]
    states = [each.init(TensorSpec((64 * 300,))) for each in collectives]
    outcomes = results(reduce_all(collectives, tensors(4, 64 * 300), states))
    assert all(torch.equal(outcome.mean, outcomes[0].mean) for outcome in outcomes)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_dense_is_the_mean(count):
    collectives, xs = [Dense(each) for each in Loopback.ranks(count, TIMEOUT_S)], tensors(count, 1000)
    before = [x.clone() for x in xs]
    for outcome in results(reduce_all(collectives, xs, [{}] * count)):
        torch.testing.assert_close(outcome.mean, sum(before) / count)
        assert outcome.sent_bytes == outcome.dense_sent_bytes
    assert all(torch.equal(x, y) for x, y in zip(xs, before, strict=True))  # what was given stays as it is


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 517, 999])
def test_what_one_rank_holds_of_nan_and_inf_all_find(bad, place):
    collectives, xs = [Dense(each) for each in Loopback.ranks(3, TIMEOUT_S)], tensors(3, 1000)
    xs[1][place] = bad
    for outcome in reduce_all(collectives, xs, [{}] * 3):
        assert isinstance(outcome, NonFiniteError)


def test_the_mean_of_the_largest_is_the_largest():
    largest = torch.finfo(torch.float32).max
    collectives = [Dense(each) for each in Loopback.ranks(4, TIMEOUT_S)]
    for outcome in results(reduce_all(collectives, [torch.full((8,), largest) for _ in range(4)], [{}] * 4)):
        assert torch.equal(outcome.mean, torch.full((8,), largest))


def test_dense_reduces_in_place_and_raises_for_nan():
    (alone,) = Loopback.ranks(1)
    x = torch.ones(4)
    assert run(Dense(alone).reduce(x, {}, Key(), 0, x)).mean.data_ptr() == x.data_ptr()
    x[2] = torch.nan
    with pytest.raises(NonFiniteError):
        run(Dense(alone).reduce(x, {}, Key(), 8, x))
