"""The table of optimizers in docs/sharding.md, row by row, and what optimizers may keep where."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from gradwire import ConfigError, ShardedOptimizerBase, ShardingConfiguration
from gradwire.optim.elementwise import scope_of
from gradwire.optim.sharded_state import cut, joined
from gradwire.optim.wrapping import load_optimizer, saved_optimizer
from gradwire.tree import from_bytes, to_bytes
from tests import needs
from tests.case import tiered
from tests.workers.optimizers import OPTIMIZERS, RATIO, Counting
from tests.workers.ranks import Cases, same_on_every_rank, without_error

pytestmark = pytest.mark.timeout(600)

DOCS = Path(__file__).parents[2] / "docs" / "sharding.md"
ROW = re.compile(r"^\| `([\w.]+)` \| ([\d, ]+) \|", re.MULTILINE)  # an optimizer, and its stages
TESTED = {name: stages.split(", ") for name, stages in ROW.findall(DOCS.read_text())}
# Those that keep nothing in their groups are tried at stage 0 by test_sharded_optimizer.py.
ROWS = [
    (name, int(stage))
    for name, stages in TESTED.items()
    for stage in stages
    if stage == stages[-1] or (stage == "0" and not name.startswith("torch."))
]
FIRST = [("torch.optim.Adafactor", 2), ("torch.optim.RMSprop", 2)]
HANDED_OVER = ("torch.optim.Adafactor", "torch.optim.Muon", "heavyball.SOAP", "schedulefree.AdamWScheduleFree")


def installed(name):
    return find_spec(name.partition(".")[0]) is not None


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    cases = {row: ("tested", {"name": row[0], "stage": row[1]}) for row in ROWS if installed(row[0])}
    for name in HANDED_OVER:
        if installed(name):
            cases["handed over", name] = ("handed_over", {"name": name})
    for stage in (0, 1):
        cases["in groups", stage] = ("in_groups", {"stage": stage})
        cases["unsaved", stage] = ("unsaved", {"stage": stage})
        if installed("schedulefree"):
            cases["switched", stage] = ("switched", {"stage": stage})
            cases["whole run", stage] = ("whole_run", {"stage": stage})
        for begin in (1, 7):
            cases["measuring", stage, begin] = ("measuring", {"stage": stage, "begin": begin})
    for stage in (1, 2):
        for ratio in (0.3, 0.1):
            cases["fewer", stage, ratio] = ("fewer_matrices", {"stage": stage, "ratio": ratio})
    with Cases(tmp_path_factory.mktemp("optimizers"), cases, 2, "tests.workers.optimizers") as ranks:
        yield ranks


def test_every_optimizer_of_the_table_is_tried():
    assert sorted(TESTED) == sorted(OPTIMIZERS)


@pytest.mark.parametrize(("name", "stage"), tiered(ROWS, first=FIRST))
def test_as_under_ddp_compressed_or_not_and_after_a_checkpoint(two, name, stage):
    needs.module(name.partition(".")[0], "make test-full")
    for rank in same_on_every_rank(two[name, stage]):
        progress = rank["before"] - rank["ddp"]
        assert progress > 0.01
        assert rank["uncompressed"] == pytest.approx(rank["ddp"], abs=1e-3)
        assert rank["before"] - rank["compressed"] > 0.9 * progress
        assert rank["ratio"] <= RATIO
        assert rank["straight"] == rank["resumed"]


@pytest.mark.parametrize("name", [name for name, stages in TESTED.items() if stages == ["0"]])
def test_statistics_of_the_whole_model_are_refused_above_stage_0(name):
    needs.module(name.partition(".")[0], "make test-full")
    kind = name.rpartition(".")[2]
    with pytest.raises(ConfigError, match=rf"{kind}, looks at the gradients of the whole model .*\(stage=0\)"):
        ShardedOptimizerBase(OPTIMIZERS[name](torch.nn.Linear(4, 4)))


@pytest.mark.full
@pytest.mark.parametrize("name", HANDED_OVER)
def test_a_state_goes_on_at_another_stage_and_in_the_optimizer_itself(two, name):
    needs.module(name.partition(".")[0], "make test-full")
    for rank in same_on_every_rank(two["handed over", name]):
        assert rank["parameters"] == rank["replicated"] == rank["plain"]


@pytest.mark.parametrize("stage", [0, 1])
def test_steps_schedulers_and_users_share_the_groups(two, stage):
    for rank in same_on_every_rank(two["in groups", stage]):
        assert rank["whole"]
        assert rank["seen"] == [[1, 1.0, 0.5, 0.0], [2, 1.5, 0.25, 0.0], [3, 1.75, 0.125, 0.1],
                                [4, 1.875, 0.0625, 0.1], 1.0]  # fmt: skip
        assert rank["loaded"] == [4, 1.875, 1.0]
        assert rank["state"] == {"0": [1, 2, 3, 4]}
        assert rank["again"] == rank["parameters"]


@pytest.mark.full
def test_what_a_step_measures_must_be_the_same_on_every_rank(two):
    """At stage 0 it is. Above, it is refused when the optimizer is wrapped, or at the latest when it shows."""
    for rank in range(2):
        assert two["measuring", 0, 1][rank] == {"words": "no error", "steps": 20}
        assert "`wrapped_optimizer`, Measuring, looks at" in two["measuring", 1, 1][rank]["words"]
        late = two["measuring", 1, 7][rank]
        assert late["steps"] == 8
        assert re.search(
            r"step 8: Measuring has set 'd' of group 0 to [\d.]+ on rank 0, [\d.]+ on rank 1", late["words"]
        )
        assert "use ShardingConfiguration(stage=0)" in late["words"]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_what_cannot_be_saved_is_warned_of_at_the_first_step(two, stage):
    for rank in without_error(two["unsaved", stage]):
        (words,) = rank["warned"]
        assert re.search(r"Hooked\.state\[parameter \d\]\['when'\] is a builtin_function_or_method", words)
        assert rank["refused"] in words


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_weights_for_evaluation_are_on_every_rank(two, stage):
    needs.module("schedulefree", "make test-full")
    for rank in same_on_every_rank(two["switched", stage]):
        (there, first), (still, second), (back, _) = rank["found"]
        assert there == still > 1e-3
        assert (first > 0) == (stage > 0)
        assert second == 0
        assert back < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_whole_run_validates_with_the_weights_for_evaluation(two, stage):
    needs.module("schedulefree", "make test-full")
    for rank in same_on_every_rank(two["whole run", stage], "parameters", "validations"):
        assert rank["modes"] == [False] * 3
        assert rank["training"]
        assert rank["validations"][-1][1] < rank["validations"][0][1]


def test_optimizers_around_others_save_states_with_numbers_as_keys():
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    optimizer, other = (Counting(parameters) for _ in range(2))
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    saved = from_bytes(to_bytes(saved_optimizer(optimizer)))
    load_optimizer(other, saved)
    assert dict(other.state[parameters[1]])[0] == {"seen": {1}}


@pytest.mark.parametrize("ratio", [0.3, 0.1])
@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_owns_nothing_meets_its_ratio(two, stage, ratio):
    owner, other = same_on_every_rank(two["fewer", stage, ratio])
    assert owner["gradient_bytes"] == 2  # flags
    assert other["weight_bytes"] == 0
    for rank in (owner, other):
        assert 0 < rank["ratio"] <= ratio
        assert rank["distance"] < (0.1 if ratio == 0.3 else 0.3)


def test_flat_states_of_whole_parameters_stay_flat():
    """Prodigy keeps a flat copy of each parameter."""
    piece = {"first": 0, "last": 6, "weights": torch.zeros(6), "master": None, "state": {"s": torch.arange(6.0)}}
    whole = joined([{"shapes": {"0": [2, 3]}, "stage": 0, "pieces": {"0": [piece]}}])["0"]
    assert cut(whole, 0, 6, (2, 3))["state"]["s"].tolist() == [0, 1, 2, 3, 4, 5]
    assert cut(whole, 2, 4, (2,))["state"]["s"].tolist() == [2, 3]


class Both(torch.optim.SGD):
    """Steps two others."""

    def __init__(self, params, lr=0.1):
        params = list(params)
        super().__init__(params, lr)
        self.both = [torch.optim.SGD(params[:1], lr), torch.optim.Adam(params[1:], lr)]

    def step(self, closure=None):
        for each in self.both:
            each.step()


def test_optimizers_that_step_others_are_refused_above_stage_0():
    with pytest.raises(ConfigError, match=r"Both, steps other optimizers, .* Use ShardingConfiguration\(stage=0\)"):
        ShardedOptimizerBase(Both(torch.nn.Linear(2, 2).parameters()))


class Clipping(torch.optim.Optimizer):
    """As Lamb does: clips by the norm of all gradients, if a group says so. It may halve its rate in place."""

    def __init__(self, params, lr=0.01, max_grad_norm=0.0, decay=1.0, **more):
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm, "decay": decay, **more})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            most = group.get("clip", 0.0) or group["max_grad_norm"]
            norm = torch.stack([p.grad.norm() for p in used]).norm()
            for p in used:
                p.sub_(group["lr"] * p.grad * (min(1.0, most / float(norm)) if most else 1.0))
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(group["decay"])


class Passing(Clipping):
    """Takes all settings by name, whatever they are."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)


class Scheduled(Clipping):
    """Needs an argument that it does not keep."""

    def __init__(self, params, total_steps, max_grad_norm=0.0):
        super().__init__(params, 1 / total_steps, max_grad_norm)


def weights(count):
    return [torch.nn.Parameter(torch.zeros(4, 4)) for _ in range(count)]


CLIPPED = {
    "never": (lambda: Clipping(weights(2)), "elements"),
    "by default": (lambda: Clipping(weights(2), max_grad_norm=0.5), "model"),
    "in the only group": (lambda: Clipping([{"params": weights(2), "max_grad_norm": 0.5}]), "model"),
    "in the second group": (
        lambda: Clipping([{"params": weights(2)}, {"params": weights(2), "max_grad_norm": 0.5}]),
        "model",
    ),
    "in all groups but one": (
        lambda: Clipping([{"params": weights(1), "max_grad_norm": 0}, {"params": weights(2)}], max_grad_norm=0.5),
        "model",
    ),
    "by no argument": (lambda: Clipping([{"params": weights(2), "clip": 0.5}]), "model"),
    "by any argument": (lambda: Passing(weights(2), max_grad_norm=0.5), "model"),
    "from a rate of 0": (lambda: Clipping(weights(2), lr=0.0, max_grad_norm=0.5), "model"),
    "never, at other rates": (
        lambda: Clipping([{"params": weights(1), "lr": 0.5}, {"params": weights(1)}]),
        "elements",
    ),
    "but not tried": (lambda: Scheduled(weights(2), 100), None),
}


@pytest.mark.parametrize("how", CLIPPED)
def test_what_the_settings_of_any_group_ask_for_is_tried(how):
    make, scope = CLIPPED[how]
    assert scope_of(make()) == scope


def test_a_trial_changes_no_setting_and_begins_without_what_steps_have_measured():
    optimizer = Clipping(weights(2), lr=torch.tensor(0.5), decay=0.5)
    assert scope_of(optimizer) == "elements"
    assert optimizer.param_groups[0]["lr"] == 0.5
    stepped = Clipping(weights(1))
    stepped.state[stepped.param_groups[0]["params"][0]]["step"] = 1
    stepped.param_groups[0]["clip"] = 0.5  # who knows who has set it
    assert scope_of(stepped) == "elements"


@pytest.mark.parametrize("partition", ["auto", "elements"])
def test_an_optimizer_that_cannot_be_tried_is_refused_above_stage_0(partition):
    words = (
        r"`wrapped_optimizer`, Scheduled, cannot be tried .*: TypeError: .*'total_steps'\..*partition='tensors'.*=0\)"
    )
    with pytest.raises(ConfigError, match=words):
        ShardedOptimizerBase(Scheduled(weights(2), 100), ShardingConfiguration(partition=partition))


def test_an_optimizer_that_cannot_be_tried_gets_whole_tensors_if_told_so():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for settings, whole in (({"partition": "tensors"}, True), ({"stage": 0}, False)):
            optimizer = ShardedOptimizerBase(Scheduled(weights(2), 100), ShardingConfiguration(**settings))
            assert optimizer.whole == whole
            optimizer.close()
    finally:
        torch.distributed.destroy_process_group()


def test_settings_of_a_group_are_refused_like_defaults():
    groups = [{"params": weights(2)}, {"params": weights(2), "max_grad_norm": 0.5}]
    with pytest.raises(ConfigError, match=r"Clipping, looks at the gradients of the whole model .*\(stage=0\)"):
        ShardedOptimizerBase(Clipping(groups))


def test_sparse_adam_is_refused():
    with pytest.raises(ConfigError, match="must take dense gradients; got SparseAdam"):
        ShardedOptimizerBase(torch.optim.SparseAdam([torch.nn.Parameter(torch.zeros(3, 3))]))
