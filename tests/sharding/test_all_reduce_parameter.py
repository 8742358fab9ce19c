"""``AllReduceParameter``: every line of what its document promises, and the facts its original's suite checks."""

import dataclasses
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire import AllReduceParameter, ConfigError, InProcessExchange, NonFiniteError, PeerError, StragglerPolicy
from gradwire.partition import partition


def group(partitions, size, *, offset=1, timeout_s=30.0, **settings):
    exchanges = InProcessExchange.group(partitions, timeout_s)
    return [AllReduceParameter(0, partitions, size, offset, exchange=each, **settings) for each in exchanges]


def begin(parameters, weights):
    return [each.init(weights) for each in parameters]


def step(parameters, gradients, average=None, rate=1.0):
    """A step of gradient descent; the weights that every partition ends with."""
    for each, gradient in zip(parameters, gradients, strict=True):
        each.put_gradients(gradient)
    for each in parameters:
        each.aggregate_gradient_partition(average or len(parameters))
        each.weight_partition.sub_(each.gradient_partition, alpha=rate)
        each.send_weight_partition()
    return weights(parameters, gradients[0])


def weights(parameters, like):
    like = like[0] if isinstance(like, list) else like
    return [each.get_weights(torch.zeros_like(like)).result(30) for each in parameters]


# Facts of the original's suite.


def test_ten_elements_in_four_partitions():
    parameters = group(4, 10)
    assert begin(parameters, torch.zeros(10)) == [(0, 0, 3), (1, 3, 3), (2, 6, 2), (3, 8, 2)]
    assert [each.local_partition_range for each in parameters] == [(0, 3), (3, 3), (6, 2), (8, 2)]


@pytest.mark.parametrize(("size", "total", "offset"), [(10, 10, 1), (2, 2, 1), (10, 20, 6)])
def test_partitions_filled_with_their_number_plus_one_average_to_two_and_a_half(size, total, offset):
    parameters = group(4, size, offset=offset)
    begin(parameters, torch.zeros(total))
    for number, each in enumerate(parameters):
        each.put_gradients(torch.full((total,), number + 1.0))
    for each in parameters:
        each.aggregate_gradient_partition(4)
        assert torch.equal(each.gradient_partition, torch.full_like(each.gradient_partition, 2.5))


def test_the_truncated_form():
    x = torch.tensor([1.111111, 2.111111, 3.111111, 4.111111, 5.111111])
    told = gradwire.decode(gradwire.encode(x, "truncate16"))
    assert told.tolist() == [1.109375, 2.109375, 3.109375, 4.09375, 5.09375]
    parameters = group(1, 5, compress="truncate16")
    begin(parameters, x)
    assert torch.equal(weights(parameters, x)[0], x)  # the first weights travel as they are


def test_global_l2_clipping():
    parameters, gradient = group(4, 100), torch.randn(100)
    begin(parameters, torch.zeros(100))
    for each in parameters:
        each.put_gradients(gradient)
    for each in parameters:
        each.aggregate_gradient_partition(4)
    before = torch.cat([each.gradient_partition for each in parameters])
    norms = in_threads([lambda each=each: each.clip_l2_norm(0.03) for each in parameters])
    after = torch.cat([each.gradient_partition for each in parameters])
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(float(before.norm()), rel=1e-6)
    assert torch.equal(after, before / (norms[0] / 0.03))


def test_a_short_gradient_is_not_clipped():
    parameters = group(1, 3)
    begin(parameters, torch.zeros(3))
    parameters[0].put_gradients(torch.full((3,), 0.01))
    parameters[0].aggregate_gradient_partition(1)
    before = parameters[0].gradient_partition.clone()
    parameters[0].clip_l2_norm(0.03)
    assert torch.equal(parameters[0].gradient_partition, before)


def test_constant_clipping():
    parameters = group(2, 4, compress="none")
    begin(parameters, torch.zeros(4))
    for each in parameters:
        each.put_gradients(torch.tensor([-3.0, -0.5, 0.5, 3.0]))
    for each in parameters:
        each.aggregate_gradient_partition(2)
        each.clip_constant(-1, 1)
    assert torch.cat([each.gradient_partition for each in parameters]).tolist() == [-1.0, -0.5, 0.5, 1.0]


# The table.


@given(size=st.integers(0, 300), parts=st.integers(1, 40))
def test_slices_follow_the_split_rule(size, parts):
    t, e = divmod(size, parts)
    expected = [(p * t + min(p, e), t + (p < e)) for p in range(parts)]
    assert [(each.start, each.stop - each.start) for each in partition(size, parts)] == expected


@pytest.mark.parametrize("size", [0, 1, 3])
def test_fewer_elements_than_partitions_work(size):
    parameters = group(5, size)
    begin(parameters, torch.ones(size))
    for each in step(parameters, [torch.full((size,), 2.0)] * 5):
        assert torch.equal(each, torch.full((size,), -1.0))


def test_fp16_sums_in_float32_and_is_exact():
    parameters = group(4, 512)
    begin(parameters, torch.zeros(512))
    for each in parameters:
        each.put_gradients([torch.ones(512)] * 128)
    for each in parameters:
        each.aggregate_gradient_partition(512)
        assert torch.equal(each.gradient_partition, torch.ones_like(each.gradient_partition))


def test_fp16_keeps_two_bytes_on_the_wire():
    parameters = group(2, 100_000)
    begin(parameters, torch.zeros(100_000))
    before = parameters[0].metrics()["sent_bytes"]
    step(parameters, [torch.randn(100_000)] * 2)
    assert parameters[0].metrics()["sent_bytes"] - before == pytest.approx(2 * (2 * 50_000), rel=0.01)


@pytest.mark.parametrize(
    "codec",
    ["none", "fp16", "truncate16", "int8", "int4", "int2", "sign", "topk:0.1", "topk:0.1+int4", "qsgd:16", "ef21(int4)",
     "dgc(topk:0.1)", "warmup:100(topk:0.05)", "rotate(int4)"],
)  # fmt: skip
def test_any_codec_by_name(codec):
    """All hold the same bits, and a constant gradient moves the weights as it should, sooner or later."""
    torch.manual_seed(0)
    start, gradient = torch.randn(1000), torch.randn(1000)
    parameters = group(3, 1000, compress=codec, compress_weights="int8")
    begin(parameters, start)
    for _ in range(60):
        found = step(parameters, [gradient] * 3, rate=0.01)
    assert all(torch.equal(each, found[0]) for each in found)
    moved = start - found[0]
    if "dgc" not in codec:
        assert float(torch.nn.functional.cosine_similarity(moved, gradient, dim=0)) > 0.9


def test_codecs_for_whole_tensors_are_refused():
    with pytest.raises(ConfigError, match=r"the codec of gradients must take tensors end to end, to be sliced; got"):
        AllReduceParameter(0, 1, 10, compress="lowrank:4")
    with pytest.raises(ConfigError, match=r"their codec must have no state of its own, got 'ef\(int4\)'"):
        AllReduceParameter(0, 1, 10, compress_weights="ef(int4)")


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "int3", "int2", "sign", "topk:0.1", "topk:0.1+int4"])
def test_zero_decodes_to_zero(codec):
    parameters = group(3, 700, compress=codec)
    begin(parameters, torch.ones(700))
    for each in step(parameters, [torch.zeros(700)] * 3):
        assert torch.equal(each, torch.ones(700))


@pytest.mark.parametrize(("codec", "expected"), [("int3", "ef(int3)"), ("topk:0.1", "ef(topk:0.1)"), ("int8", "int8")])
def test_error_feedback_is_on_by_default(codec, expected):
    assert AllReduceParameter(0, 1, 10, compress=codec).compress == expected
    assert AllReduceParameter(0, 1, 10, compress=codec, feedback=False).compress == codec


def test_a_missing_block_is_an_error():
    parameters = group(3, 10, timeout_s=0.1)
    begin(parameters, torch.zeros(10))
    for each in parameters[:2]:
        each.put_gradients(torch.ones(10))
    with pytest.raises(PeerError, match=r"partition 2 has left no block for 0\.1 s"):
        parameters[0].aggregate_gradient_partition(3)


def test_a_partition_that_is_gone_is_an_error():
    parameters = group(2, 10)
    begin(parameters, torch.zeros(10))
    parameters[0].put_gradients(torch.ones(10))
    parameters[1].close()
    with pytest.raises(PeerError, match="partition 1 is gone"):
        parameters[0].aggregate_gradient_partition(2)


def test_aggregation_is_idempotent():
    parameters = group(2, 10)
    begin(parameters, torch.zeros(10))
    for each in parameters:
        each.put_gradients(torch.ones(10))
    for each in parameters:
        each.aggregate_gradient_partition(2)
        each.gradient_partition.mul_(3)
        each.aggregate_gradient_partition(2)
        assert torch.equal(each.gradient_partition, torch.full((5,), 3.0))
        each.weight_partition.fill_(7)
        each.send_weight_partition()
        each.weight_partition.fill_(8)
        each.send_weight_partition()
    for _ in range(2):
        assert torch.equal(weights(parameters, torch.zeros(10))[0], torch.full((10,), 7.0))


def test_local_replicas_are_summed_before_they_are_sent():
    parameters = group(2, 6, compress="none")
    begin(parameters, torch.zeros(6))
    before = parameters[0].metrics()["sent_bytes"]
    found = step(parameters, [[torch.ones(6), torch.full((6,), 2.0)], [torch.full((6,), 5.0)]], average=4)
    assert torch.equal(found[0], torch.full((6,), -2.0))
    one_replica = group(2, 6, compress="none")
    begin(one_replica, torch.zeros(6))
    other = one_replica[0].metrics()["sent_bytes"]
    step(one_replica, [torch.ones(6)] * 2)
    assert parameters[0].metrics()["sent_bytes"] - before == one_replica[0].metrics()["sent_bytes"] - other


def test_what_lies_outside_the_window_is_left_alone():
    parameters = group(2, 3, offset=3)
    begin(parameters, torch.arange(8.0))
    found = step(parameters, [torch.ones(8)] * 2)
    local = torch.full((8,), 9.0)
    parameters[1].get_weights(local).result()
    assert local.tolist() == [9, 9, 1, 2, 3, 9, 9, 9]
    assert found[0].tolist() == [0, 0, 1, 2, 3, 0, 0, 0]


def test_nothing_is_lost_with_error_feedback():
    """What was sent and what is kept back add up to all gradients."""
    torch.manual_seed(1)
    parameters, total = group(3, 500, compress="topk:0.05", compress_weights="none"), torch.zeros(500)
    begin(parameters, torch.zeros(500))
    for _ in range(20):
        gradients = [torch.randn(500) for _ in range(3)]
        total += sum(gradients) / 3
        found = step(parameters, gradients)[0]
    kept = sum(each._shard.states[0]["residual"] for each in parameters) / 3
    torch.testing.assert_close(found, -(total - kept), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_gradients_raise_on_every_partition_and_change_nothing(bad):
    parameters = group(3, 9, compress="topk:0.5")
    begin(parameters, torch.ones(9))
    for number, each in enumerate(parameters):
        gradient = torch.ones(9)
        gradient[0] = bad if number == 1 else 1.0
        each.put_gradients(gradient)
    for each in parameters:
        with pytest.raises(NonFiniteError, match=r"step 1: NaN or Inf in the gradients of partitions \[1\]"):
            each.aggregate_gradient_partition(3)
        assert not each._shard.states[0]["residual"].any()
    assert all(torch.equal(each, torch.ones(9)) for each in weights(parameters, torch.zeros(9)))
    found = step(parameters, [torch.full((9,), 2.0)] * 3)
    assert all(torch.equal(each, found[0]) for each in found)


def test_futures_raise_what_went_wrong():
    parameters = group(2, 10, timeout_s=0.1)
    parameters[0].init(torch.zeros(10))
    future = parameters[0].get_weights(torch.zeros(10))
    with pytest.raises(PeerError, match="partition 1 has left no block"):
        future.result()
    assert len(future.futures) == 2
    assert future.done()


def test_a_future_may_be_waited_for_for_a_while():
    parameters = group(2, 10, timeout_s=2)
    parameters[0].init(torch.zeros(10))
    future = parameters[0].get_weights(torch.zeros(10))
    with pytest.raises(TimeoutError, match=r"the weights of partitions \[1\] are not there after 0\.05 s"):
        future.result(0.05)
    parameters[1].init(torch.ones(10))
    assert future.result().tolist() == [0] * 5 + [1] * 5


# Stragglers.


POLICY = StragglerPolicy(drop=0.0, max_drop=0.5, warmup=2, least_s=0.02)


def late_step(parameters, late, gradient):
    """A step that some partitions miss."""
    here = [each for number, each in enumerate(parameters) if number not in late]
    for each in here:
        each.put_gradients(gradient)
    for each in here:
        each.aggregate_gradient_partition(len(parameters))
        if not each.abandoned:
            each.weight_partition.sub_(each.gradient_partition)
        each.send_weight_partition()
    return here


def test_a_late_gradient_is_left_out_and_counted_and_the_mean_is_of_what_came():
    parameters = group(4, 8, compress="none", stragglers=POLICY)
    begin(parameters, torch.zeros(8))
    for _ in range(2):
        step(parameters, [torch.ones(8)] * 4)
    here = late_step(parameters, {3}, torch.ones(8))
    assert all(torch.equal(each.gradient_partition, torch.ones(2)) for each in here)
    assert all(each.metrics()["dropped"] == 1 for each in here)
    found = here[0].get_weights(torch.zeros(8)).result()
    assert found.tolist() == [-3.0] * 6 + [-2.0] * 2  # the slice of the late one is as it was
    assert here[0].metrics()["stale"] == 1


def test_what_comes_late_is_taken_off_the_exchange_and_waited_for_again():
    patient = dataclasses.replace(POLICY, least_s=0.4)
    parameters = group(3, 6, compress="none", stragglers=patient)
    begin(parameters, torch.zeros(6))
    for _ in range(2):
        step(parameters, [torch.ones(6)] * 3)
    late_step(parameters, {2}, torch.ones(6))
    started = time.monotonic()
    for _ in range(50):
        late_step(parameters, {2}, torch.ones(6))
    assert time.monotonic() - started < 50 * patient.least_s / 4  # who is known to be late is not waited for
    for _ in range(51):
        late_step(parameters, {0, 1}, torch.ones(6))
    for _ in range(3):
        step(parameters, [torch.ones(6)] * 3)
    dropped = [each.metrics()["dropped"] for each in parameters]
    assert dropped[:2] == [51, 51]
    blocks = parameters[0]._shard.exchange._shared.blocks
    for each in parameters:
        each.get_weights(torch.zeros(6)).result()
    assert not blocks
    found = weights(parameters, torch.zeros(6))
    assert torch.equal(found[0], found[2])


def test_a_step_with_too_few_gradients_is_abandoned():
    parameters = group(4, 8, compress="none", stragglers=POLICY)
    begin(parameters, torch.zeros(8))
    for _ in range(2):
        step(parameters, [torch.ones(8)] * 4)
    here = late_step(parameters, {1, 2, 3}, torch.ones(8))
    assert here[0].abandoned
    assert not here[0].gradient_partition.any()
    assert here[0].metrics()["abandoned"] == 1
    assert here[0].weight_partition.tolist() == [-2.0, -2.0]


def test_nobody_is_left_out_while_times_are_learned():
    parameters = group(2, 4, timeout_s=0.2, stragglers=StragglerPolicy(warmup=5))
    begin(parameters, torch.zeros(4))
    parameters[0].put_gradients(torch.ones(4))
    with pytest.raises(PeerError, match="partition 1 has left no block"):
        parameters[0].aggregate_gradient_partition(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": 1}, r"`drop` of a straggler policy must be in \[0, 1\); got 1"),
        ({"max_drop": -0.1}, r"`max_drop` of a straggler policy must be in \[0, 1\); got -0.1"),
        ({"warmup": 0}, "`warmup` of a straggler policy must be at least 1; got 0"),
        ({"slack": 0.5}, "`slack` of a straggler policy must be at least 1; got 0.5"),
    ],
)
def test_bad_policies(change, message):
    with pytest.raises(ConfigError, match=message):
        StragglerPolicy(**change)


def test_a_policy_may_be_at_every_bound_and_not_beyond():
    bounds = {"drop": 0, "max_drop": 0, "warmup": 1, "window": 1, "slack": 1, "least_s": 0}
    StragglerPolicy(**bounds)
    for name, bound in bounds.items():
        with pytest.raises(ConfigError, match=f"`{name}`"):
            StragglerPolicy(**{name: bound - 0.001})
    for name in ("drop", "max_drop"):
        with pytest.raises(ConfigError, match=f"`{name}`"):
            StragglerPolicy(**{name: 1.0})


# Laws.


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(0, 200), parts=st.integers(1, 6), steps=st.integers(1, 4), seed=st.integers(0, 1000),
    codec=st.sampled_from(["none", "int8", "ef(int4)", "topk:0.2", "sign"]),
    back=st.sampled_from(["none", "int8", "int4", "topk:0.5"]),
)  # fmt: skip
def test_all_hold_the_same_bits(size, parts, steps, seed, codec, back):
    torch.manual_seed(seed)
    parameters = group(parts, size, compress=codec, compress_weights=back)
    begin(parameters, torch.randn(size))
    for _ in range(steps):
        found = step(parameters, [torch.randn(size) for _ in range(parts)], rate=0.1)
        assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("back", ["int8", "int4", "int2", "topk:0.1"])
def test_held_weights_follow_the_owners(back):
    """What compression of weights leaves behind is sent later."""
    torch.manual_seed(0)
    parameters = group(2, 1000, compress="none", compress_weights=back)
    begin(parameters, torch.randn(1000))
    step(parameters, [torch.randn(1000)] * 2)
    for _ in range(60):
        found = step(parameters, [torch.zeros(1000)] * 2)
    truth = torch.cat([each.weight_partition for each in parameters])
    torch.testing.assert_close(found[0], truth, atol=1e-3, rtol=1e-3)


# Bad calls.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition_num": 0}, "`partition_num` must be a whole number of at least 1; got 0"),
        ({"partition_num": 3}, "`partition_num` must be that of the exchange, 1; got 3"),
        ({"size": -1}, "`size` must be a whole number of at least 0; got -1"),
        ({"size": 2.5}, "`size` must be a whole number of at least 0; got 2.5"),
        ({"param_offset": 0}, "`param_offset` must be a whole number of at least 1; got 0"),
        ({"id": -1}, "`id` must be from 0 to 4095; got -1"),
        ({"compress": "nope"}, "unknown codec 'nope'"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigError, match=message):
        AllReduceParameter(**{"id": 0, "partition_num": 1, "size": 4, **arguments})


def test_calls_out_of_order():
    each = AllReduceParameter(0, 1, 4)
    with pytest.raises(ConfigError, match=r"call init\(parameter\) first"):
        each.put_gradients(torch.ones(4))
    with pytest.raises(ConfigError, match=r"call init\(parameter\) first"):
        _ = each.weight_partition
    each.init(torch.zeros(4))
    with pytest.raises(ConfigError, match="no gradients were put in this step"):
        each.aggregate_gradient_partition(1)
    each.put_gradients(torch.ones(4))
    with pytest.raises(ConfigError, match="gradients of step 1 were put already"):
        each.put_gradients(torch.ones(4))
    with pytest.raises(ConfigError, match="call aggregate_gradient_partition before"):
        each.send_weight_partition()
    with pytest.raises(ConfigError, match="call send_weight_partition before get_weights"):
        each.get_weights(torch.zeros(4))
    with pytest.raises(ConfigError, match="`avg_numbers` must be above 0; got 0"):
        each.aggregate_gradient_partition(0)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3), r"`parameter` must have at least 4 elements \(param_offset 1, size 4\); got 3"),
        (torch.zeros(4, dtype=torch.int64), "must be a contiguous tensor of floats; got torch.int64 of shape"),
        (torch.zeros(4, 2).T, "must be a contiguous tensor of floats"),
        ([1.0] * 4, "must be a contiguous tensor of floats; got list"),
    ],
)
def test_bad_tensors(tensor, message):
    with pytest.raises(ConfigError, match=message):
        AllReduceParameter(0, 1, 4).init(tensor)


def in_threads(calls):
    results, threads = [None] * len(calls), []

    def run(number):
        results[number] = calls[number]()

    for number in range(len(calls)):
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
    for thread in threads:
        thread.join(30)
    return results
