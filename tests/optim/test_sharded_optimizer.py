"""``GradientCompressionOptimizer`` and its base, between real processes."""

import math
import re

import pytest
import torch
from torch import nn

from gradwire import (
    ConfigError,
    GradientCompressionOptimizer,
    ShardedOptimizerBase,
    ShardingConfiguration,
    StragglerPolicy,
)
from tests.case import tiered
from tests.workers.ranks import Cases, said, same_on_every_rank, without_error

pytestmark = pytest.mark.timeout(600)

STAGES = (0, 1, 2)
EXACT = ("sgd", "adam", "adamw", "adamw foreach", "adagrad", "rmsprop", "adafactor", "lion")
RATIOS = (1.0, 0.5, 0.3, 0.15, 0.1, 0.05, 0.03)
DAMAGES = ("marker", "junk marker", "gone", "changed", "short", "other")
FLAGS = {"quantized": (True, False), "sparse": (False, True), "both": (True, True), "neither": (False, False)}


def cases_of_two(folder):
    cases = {}
    for stage in STAGES:
        for name in (*EXACT, "adamw fused"):
            cases["like", name, stage] = ("like_ddp", {"optimizer": name, "stage": stage})
        for how in ("called", "configured", "value"):
            cases["clipped", how, stage] = ("clipped", {"how": how, "stage": stage})
        cases["scheduled", stage] = ("scheduled", {"stage": stage})
        for auto in (True, False):
            cases["accumulated", stage, auto] = ("accumulated", {"stage": stage, "auto": auto})
            cases["scaled", stage, auto] = ("scaled", {"stage": stage, "auto": auto})
        cases["synchronized", stage] = ("synchronized", {"stage": stage})
        cases["exported", stage] = ("exported", {"stage": stage})
        cases["after", stage] = ("wrapped_after_training", {"stage": stage})
        cases["half", stage] = ("half", {"stage": stage})
        for unused in ("by all", "by some"):
            cases["branches", unused, stage] = ("branches", {"stage": stage, "unused": unused})
    cases["like", "tensors"] = ("like_ddp", {"optimizer": "adamw", "stage": 1, "partition": "tensors"})
    for how in ("clipped", "unscaled", "zeroed"):
        for stage in STAGES:
            cases["edited", how, stage] = ("edited", {"how": how, "stage": stage})
    for stage in STAGES:
        cases["replaced", stage] = ("replaced_weights", {"stage": stage})
        cases["frozen", stage] = ("frozen", {"stage": stage})
        cases["unscaled", stage] = ("unscaled_and_clipped", {"stage": stage})
    for name in ("unusual_parameters", "misused", "uneven_loaders", "different_steps"):
        cases[name] = (name, {})
    cases["buffers"] = ("buffers", {"folder": folder})
    for stage in STAGES:
        cases["changed inside", stage] = ("changed_inside", {"stage": stage})
    for name in ("twice_without_no_sync", "with_closure", "scaled_without_telling", "no_gradients",
                 "first_ranks_weights", "scaled_gradients", "compiled", "stopped"):  # fmt: skip
        cases[name] = (name, {})
    for how in ("epochs", "steps", "function", "patience", "asked", "empty"):
        cases["optimized", how] = ("optimized", {"how": how, "folder": folder})
    cases["resumed_epochs"] = ("resumed_epochs", {"folder": folder})
    for what in DAMAGES:
        cases["damaged", what] = ("damaged", {"folder": f"{folder}/{what}", "what": what})
    cases["kept"] = ("kept", {"folder": f"{folder}/kept"})
    for codec in ("fp16", "int4", "topk:0.1", "ef21(int4)"):
        for transport in ("sockets", "gloo", "default"):
            cases["partitioned", codec, transport] = ("partitioned", {"codec": codec, "transport": transport})
    for stage in STAGES:
        cases["gloo", stage] = ("over_gloo", {"stage": stage})
    for what in ("stage", "ratio"):
        cases["different", what] = ("different", {"what": what})
    return cases


def cases_of_three(folder):
    cases = {}
    for stage in STAGES:
        cases["like", stage] = ("like_ddp", {"optimizer": "adamw", "stage": stage})
        for ratio in RATIOS:
            cases["ratio", ratio, "quantized", stage] = ("trained", {"ratio": ratio, "stage": stage, "steps": 3})
        for name, flags in FLAGS.items():
            cases["ratio", 0.2, name, stage] = ("trained", {"ratio": 0.2, "flags": flags, "stage": stage})
        for policy in ("raise", "skip"):
            for ratio in (None, 0.1):
                how = {"stage": stage, "policy": policy, "ratio": ratio}
                cases["nonfinite", stage, policy, ratio] = ("nonfinite", how)
        for how in ("bytes", "dict", "torch"):
            cases["resumed", stage, how] = ("resumed", {"stage": stage, "how": how, "folder": folder})
        for codec in ("ef21(int4)", "int4:rounding=stochastic", "topk:0.1"):
            how = {"stage": stage, "how": "bytes", "folder": folder, "gradients": codec}
            cases["resumed", stage, codec] = ("resumed", how)
        cases["resumed", stage, "adafactor"] = (
            "resumed", {"stage": stage, "how": "bytes", "folder": folder, "optimizer": "adafactor"})  # fmt: skip
    cases["refused"] = ("refused", {"folder": folder})
    cases["memory"] = ("memory", {"stage": 1})
    cases["memory", 2] = ("memory", {"stage": 2})
    return cases


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with Cases(folder, cases_of_two(str(folder)), 2, "tests.workers.sharded") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    with Cases(folder, cases_of_three(str(folder)), 3, "tests.workers.sharded") as ranks:
        yield ranks


def one(answers):
    return same_on_every_rank(answers)[0]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
@pytest.mark.parametrize("name", tiered(EXACT, first=["sgd", "adamw", "adafactor"]))
def test_uncompressed_it_is_plain_ddp_to_the_last_bit(two, name, stage):
    found = one(two["like", name, stage])
    assert found["equal"]
    assert found["whole"] == (name == "adafactor" and stage > 0)


def test_whole_tensors_as_well(two):
    assert one(two["like", "tensors"])["equal"]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_fused_kernels_round_the_ends_of_tensors_otherwise(two, stage):
    """They vectorize all but the last few elements of a tensor, and slices end elsewhere."""
    assert one(two["like", "adamw fused", stage])["largest"] < 1e-6


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_with_three_ranks_only_the_order_of_sums_differs(three, stage):
    """DDP's ring adds up each chunk from another rank on, and divides first."""
    assert one(three["like", stage])["largest"] < 1e-6


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
@pytest.mark.parametrize("ratio", tiered(RATIOS, first=[0.5, 0.1]))
def test_the_ratio_is_a_promise_about_the_wire(three, ratio, stage):
    for rank in same_on_every_rank(three["ratio", ratio, "quantized", stage]):
        assert 0 < rank["ratio"] <= ratio
        assert all(0 < leg <= ratio for leg in rank["legs"].values())


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
@pytest.mark.parametrize("flags", tiered(FLAGS, first=["both"]))
def test_flags_choose_the_family(three, flags, stage):
    for rank in same_on_every_rank(three["ratio", 0.2, flags, stage]):
        assert rank["last"] < 0.75 * rank["first"]
        assert rank["ratio"] <= 0.2 or (flags == "neither" and rank["ratio"] < 1.1)


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
@pytest.mark.parametrize("how", ["called", "configured", "value"])
def test_clipping_is_of_the_mean_gradient_over_all_ranks(two, how, stage):
    found = one(two["clipped", how, stage])
    assert found["largest"] < 1e-6
    assert found["norms"] < 1e-5


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_groups_and_schedulers(two, stage):
    assert one(two["scheduled", stage])["equal"]


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_accumulated_gradients(two, stage, auto):
    assert one(two["accumulated", stage, auto])["largest"] < 1e-6


def test_a_second_backward_is_refused_with_advice(two):
    assert all("accumulate under `with optimizer.no_sync():`" in words for words in two["twice_without_no_sync"])


@pytest.mark.parametrize("auto", [True, False])
@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_a_scaler_skips_a_step_on_every_rank(two, stage, auto):
    for rank in same_on_every_rank(two["scaled", stage, auto]):
        assert rank["steps"] == 5
        assert rank["skipped"] == 1
        assert rank["largest"] < 1e-5
        if auto:
            assert rank["scales"] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
@pytest.mark.parametrize("how", ["clipped", "unscaled", "zeroed"])
def test_gradients_that_are_changed_after_some_were_sent_are_refused(two, how, stage):
    telling = "give the GradScaler to" if how == "unscaled" else "gradients were changed after backward"
    assert all(telling in words for words in two["edited", how, stage]), two["edited", how, stage]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_a_scaler_that_is_told_of_may_unscale_before_clipping(two, stage):
    assert one(two["unscaled", stage])["largest"] < 1e-6


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_weights_that_are_loaded_after_wrapping_count(two, stage):
    assert one(two["replaced", stage])["largest"] < 1e-6


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_frozen_parameters_stay_and_do_not_travel(two, stage):
    for rank in same_on_every_rank(two["frozen", stage]):
        assert rank["frozen_unchanged"]
        assert rank["equal"]
        assert rank["again"] == rank["parameters"]


def test_parameters_of_any_shape(two):
    assert one(two["unusual_parameters"])["equal"]


def test_misuse_is_refused_with_advice(two):
    for rank in without_error(two["misused"]):
        assert "cannot be added to a sharded optimizer" in rank["add_param_group"]
        assert "Save it by serialize()" in rank["deepcopy"]
        assert "save it by serialize() or state_dict()" in rank["pickle"]
        assert "sharded already: wrap it once" in rank["twice"]
        assert "`max_norm` must be above 0 and finite; got nan" in rank["clip"]
        assert "a state must come from state_dict()" in rank["nothing"]
        assert "a saved state is bytes; got str" in rank["text"]
        assert "unknown codec 'bogus'" in rank["codec"]
        assert "`model` must be the one whose parameters the optimizer has" in rank["model"]
        assert rank["closed"] == ["close() was called: this optimizer can no longer be used."] * 3


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_what_would_be_lost_of_changes_to_the_wrapped_optimizer_is_refused(two, stage):
    words = {
        "loaded": r"`wrapped_optimizer`, AdamW, has another `param_groups` .* Call load_state_dict\(\) or",
        "state": r"`wrapped_optimizer`, AdamW, has another `state` than when it was wrapped",
        "appended": r"parameters were added .* AdamW, have \[11\] of them, and had \[10\]\. Wrap it after",
        "taken": r".* or taken from it: .* have \[9\] of them, and had \[10\]",
        "group": r".* have \[10, 1\] of them, and had \[10\]",
    }
    for rank in without_error(two["changed inside", stage]):
        assert rank.keys() == words.keys()
        for what, (refusal, saved_too, left_alone) in rank.items():
            assert re.match(words[what], refusal)
            assert saved_too
            assert left_alone


def test_epochs_have_as_many_batches_as_every_rank_has(two):
    assert [rank["steps"] for rank in same_on_every_rank(two["uneven_loaders"])] == [6, 6]


def test_ranks_that_want_other_steps_are_told(two):
    assert all("a run of steps=" in words for words in two["different_steps"])


def test_buffers_are_in_the_checkpoints_of_a_run(two):
    for rank in without_error(two["buffers"]):
        assert rank["straight"] == rank["again"]


def test_a_scaler_that_is_not_told_of(two):
    assert all(
        "give the GradScaler to ShardingConfiguration(scaler=...)" in words for words in two["scaled_without_telling"]
    )


def test_closures(two):
    found = one(two["with_closure"])
    assert found["parameters"] == found["again"]
    assert all(math.isfinite(loss) for loss in found["losses"])


@pytest.mark.parametrize("unused", ["by all", "by some"])
@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_parameters_without_gradients_are_agreed_on(two, stage, unused):
    assert one(two["branches", unused, stage])["largest"] < 1e-6


def test_a_rank_without_gradients_strands_nobody(two):
    assert one(two["no_gradients"])["steps"] == 3


@pytest.mark.parametrize("ratio", [None, 0.1])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_nonfinite_gradients_of_one_rank(three, stage, policy, ratio):
    for rank in same_on_every_rank(three["nonfinite", stage, policy, ratio]):
        assert rank["words"] == (
            "no error" if policy == "skip" else "step 3: NaN or Inf in the gradients of ranks [1]."
        )
        assert rank["kept"]
        assert rank["unchanged"]
        assert rank["skipped"] == 1


@pytest.mark.parametrize(
    "how", ["bytes", "dict", "torch", "ef21(int4)", "int4:rounding=stochastic", "topk:0.1", "adafactor"]
)
@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_a_resumed_run_goes_on_bit_for_bit(three, stage, how):
    for rank in same_on_every_rank(three["resumed", stage, how]):
        assert rank["parameters"] == rank["again"]
        assert rank["steps"] == [6, 6]


@pytest.mark.parametrize(
    ("what", "words"),
    {
        "ranks": "the state is of {'ranks': 7, 'stage': 1,",
        "rank": "; this is rank ",
        "wrapped": "the state is of AdamW; this optimizer wraps SGD.",
        "shapes": "the state is of 10 parameters of other shapes than this optimizer's 2.",
        "junk": "not a saved state: 4 bytes are no safetensors file.",
        "nothing": "a state must come from state_dict() or serialize(), with 'format' of type int; got NoneType.",
        "missing": "with 'pieces' of type Mapping; got NoneType",
    }.items(),
)
def test_states_that_cannot_be_honoured_are_refused(three, what, words):
    assert all(words in rank[what] for rank in without_error(three["refused"])), three["refused"][0][what]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_optimizer_state_is_really_synchronized(two, stage):
    for rank in same_on_every_rank(two["synchronized", stage]):
        assert rank["same"]
        assert rank["agreed"]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_the_whole_state_is_that_of_the_plain_optimizer(two, stage):
    found = one(two["exported", stage])
    assert found["parameters"] == found["again"]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_moments_from_before_are_kept(two, stage):
    found = one(two["after", stage])
    assert found["parameters"] == found["again"]


def test_all_ranks_begin_with_the_first_ones_weights(two):
    one(two["first_ranks_weights"])


def test_gradients_scaled_one_and_two_step_like_one_and_a_half(two):
    assert one(two["scaled_gradients"])["largest"] < 1e-6


@pytest.mark.parametrize("what", ["stage", "ratio"])
def test_ranks_that_differ_are_named(two, what):
    assert all(words.startswith("rank 1 has 'AdamW, compression_ratio 0.") for words in two["different", what])


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_parameters_in_16_bits(two, stage):
    found = one(two["half", stage])
    assert found["last"] < 0.8 * found["first"]


def test_state_is_shared(three):
    shares = [rank["share"] for rank in without_error(three["memory"])]
    assert sum(shares) == pytest.approx(1.0)
    assert max(shares) < 0.34
    assert all(rank["gradients"] == 10 for rank in three["memory"])
    assert all(rank["gradients"] == 0 for rank in three["memory", 2])


@pytest.mark.full
def test_compiled_models(two):
    assert len(one(two["compiled"])["losses"]) == 4


def test_any_rank_stops_all(two):
    assert [rank["steps"] for rank in two["stopped"]] == [5, 5]


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """Two ranks save, four go on, and three."""
    folder = tmp_path_factory.mktemp("moved")
    answers = []
    for ranks, case in ((2, "saved"), (4, "loaded"), (3, "loaded")):
        cases = {}
        for name, stages in {"1": (1, 1, 1), "2": (2, 2, 2), "other": (0, 2, 1)}.items():
            for feedback in (True, False):
                how = {"folder": str(folder / f"{name}-{feedback}"), "ratio": 0.1, "feedback": feedback}
                how |= {"stage": stages[len(answers)], **({"before": 2} if case == "loaded" else {})}
                cases[name, feedback] = (case, how)
        answers.append(said(folder, cases, ranks, "tests.workers.sharded"))
    return {key: tuple(each[key] for each in answers) for key in answers[0]}


@pytest.mark.full
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("name", ["1", "2", "other"])
def test_other_numbers_of_ranks_go_on(moved, name, feedback):
    first, *others = moved[name, feedback]
    before = same_on_every_rank(first)
    for answers in others:
        for rank in same_on_every_rank(answers, "start", "parameters"):
            assert rank["moments"] == pytest.approx(before[0]["moments"])
            assert rank["exact"] == pytest.approx(before[0]["exact"])
            assert rank["steps"] == 23
            assert rank["losses"][1] < rank["losses"][0]
        # What no old rank has sent, over their number, is what no new one has, over theirs.
        unsent = sum(rank["residual"] for rank in before) / len(before) + sum(rank["owned"] for rank in before)
        assert sum(rank["residual"] for rank in answers) / len(answers) == pytest.approx(unsent, abs=1e-4)
        assert bool(unsent) == feedback


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("distributed"))
    how = {"folder": f"{folder}/checkpoint"}
    first = said(
        folder, {"a": ("distributed_checkpoint", {**how, "act": "save", "stage": 1})}, 2, "tests.workers.sharded"
    )
    cases = {stage: ("distributed_checkpoint", {**how, "act": "load", "stage": stage}) for stage in (1, 2)}
    return first["a"], {ranks: said(folder, cases, ranks, "tests.workers.sharded") for ranks in (2, 3)}


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_by_torch_distributed_checkpoint(distributed, ranks, stage):
    saved, loaded = distributed
    start = same_on_every_rank(saved)[0]["parameters"]
    for rank in same_on_every_rank(loaded[ranks][stage], "start", "parameters", "steps"):
        assert rank["start"] == start
        assert rank["steps"] == 5


@pytest.mark.parametrize(
    ("how", "steps", "ended"), [("epochs", 15, "epochs"), ("steps", 7, "steps"), ("function", 6, "steps")]
)
def test_a_whole_run(two, how, steps, ended):
    for rank in same_on_every_rank(two["optimized", how]):
        assert (rank["steps"], rank["losses"], rank["ended"]) == (steps, steps, ended)
        assert rank["ratio"] <= 0.2


def test_a_run_ends_early_on_all_ranks_if_any_sees_no_progress(two):
    zero, one = same_on_every_rank(two["optimized", "patience"])
    assert zero["ended"] == one["ended"] == "early"
    assert zero["steps"] == one["steps"] == 9  # no progress after the fourth validation, and all know a step later
    assert zero["best"] == 2.0
    assert [step for step, _ in zero["validations"]] == [2, 4, 6, 8]


def test_a_run_ends_when_somebody_asks_for_it(two):
    assert [rank["steps"] for rank in two["optimized", "asked"]] == [4, 4]


def test_a_run_without_batches(two):
    assert all("`batches` has none" in rank["words"] for rank in two["optimized", "empty"])


def test_a_resumed_run_sees_the_batches_that_are_left(two):
    found = one(two["resumed_epochs"])
    assert found["parameters"] == found["again"]
    assert found["from"] == 7


@pytest.mark.parametrize("what", DAMAGES)
def test_damaged_checkpoints_are_refused_on_every_rank(two, what):
    words = two["damaged", what]
    telling = {
        "marker": "it has no COMPLETE",
        "junk marker": "is not the marker of a checkpoint",
        "gone": "cannot be read",
    }
    assert all(telling.get(what, "is damaged") in each for each in words), words


def test_old_checkpoints_go(two):
    assert two["kept"] == [["step-0000000003", "step-0000000004"]] * 2


@pytest.mark.parametrize("codec", ["fp16", "int4", "topk:0.1", "ef21(int4)"])
def test_partitions_that_are_processes(two, codec):
    answers = [one(two["partitioned", codec, transport]) for transport in ("sockets", "gloo", "default")]
    assert len({answer["parameters"] for answer in answers}) == 1
    assert [rank["where"] for rank in two["partitioned", codec, "sockets"]] == [[0, 0, 501], [1, 501, 500]]


@pytest.mark.parametrize("stage", tiered(STAGES, first=[2]))
def test_without_the_native_core_it_is_the_same(two, stage):
    found = one(two["gloo", stage])
    assert found["parameters"] == found["again"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression_ratio": 0}, r"`compression_ratio` must be in \(0, 1\]; got 0"),
        ({"compression_ratio": 1.5}, r"`compression_ratio` must be in \(0, 1\]; got 1.5"),
        ({"compression_ratio": float("nan")}, r"`compression_ratio` must be in \(0, 1\]; got nan"),
        ({"compression_ratio": "0.1"}, r"`compression_ratio` must be in \(0, 1\]; got '0.1'"),
        ({"use_quantization": 1}, "`use_quantization` must be True or False; got 1"),
        ({"wrapped_optimizer": "adam"}, "must be a gradient-based optimizer, a torch.optim.Optimizer; got str"),
        ({"config": {}}, "`config` must be a ShardingConfiguration; got dict"),
    ],
)
def test_bad_arguments(arguments, message):
    model = nn.Linear(2, 2)
    given = {"wrapped_optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments}
    with pytest.raises(ConfigError, match=message):
        GradientCompressionOptimizer(**given)


def test_optimizers_that_cannot_be_sharded():
    with pytest.raises(ConfigError, match="must step once a gradient; got LBFGS"):
        ShardedOptimizerBase(torch.optim.LBFGS(nn.Linear(2, 2).parameters()))
    with pytest.raises(ConfigError, match=r"parameters of float64.*`model.float\(\)`"):
        ShardedOptimizerBase(torch.optim.AdamW(nn.Linear(2, 2).double().parameters()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stage": 3}, "`stage` must be 0, 1 or 2; got 3"),
        ({"stage": "1"}, "`stage` must be 0, 1 or 2; got '1'"),
        ({"bucket_bytes": 10}, "`bucket_bytes` must be at least 1024; got 10"),
        ({"clip_norm": -1.0}, "`clip_norm` must be above 0, or None; got -1.0"),
        ({"clip_norm": 0}, "`clip_norm` must be above 0, or None; got 0"),
        ({"clip_norm": True}, "`clip_norm` must be above 0, or None; got True"),
        ({"clip_value": math.inf}, "`clip_value` must be above 0, or None; got inf"),
        ({"nonfinite": "ignore"}, "`nonfinite` must be 'raise' or 'skip'; got 'ignore'"),
        ({"stage": 0, "stragglers": StragglerPolicy()}, "`stage` must be 1 or 2 to leave out stragglers; got 0"),
        ({"stragglers": 0.1}, "`stragglers` must be a StragglerPolicy, or None; got 0.1"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        ShardingConfiguration(**change)


def test_presets():
    assert ShardingConfiguration.default() == ShardingConfiguration()
    assert ShardingConfiguration.high_bandwidth(stage=2).stage == 2
    assert ShardingConfiguration.low_bandwidth().stage == 2
