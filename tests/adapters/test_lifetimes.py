"""Nothing stays of what was closed or deleted, and a copy of a compressed model is a plain one; between real processes.

Counted are objects, by weak references, descriptors and threads, also those of the native core, of things made twice.
"""

import sys

import pytest

from tests.case import tiered
from tests.workers.lifetimes import NOTHING
from tests.workers.ranks import Cases, same_on_every_rank, without_error

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors and threads are counted in /proc"),
]

COMPRESSIONS = {
    "int4": {"codec": "int4"},
    "gloo": {"codec": "int4", "transport": "gloo"},
    "powersgd": {"codec": "powersgd:2,start=1+int8"},
    "dense": {"codec": "dense"},
    "telemetry": {"codec": "int8", "telemetry": True},
    "failed": {"codec": "int4", "fails": True},
    "failed dense": {"codec": "dense", "fails": True},
}
OPTIMIZERS = ("GradientCompressionOptimizer", "ShardedOptimizerBase", "LocalAccumulation", "LocalSGD", "DiLoCo", "DeMo")
OTHERS = {name: {"maker": name} for name in ("auto", "replica", "sharded_model", "all_reduce_parameter")}
THINGS = {
    **{name: {"maker": "compression", **options} for name, options in COMPRESSIONS.items()},
    **{name: {"maker": "optimizer", "make": name} for name in OPTIMIZERS},
    **OTHERS,
}
OF_THREE = ("int4", "dense", "GradientCompressionOptimizer", "DiLoCo")
FIRST = ("int4", "dense", "GradientCompressionOptimizer", "all_reduce_parameter")
COPIES = [("deepcopy", "int4"), ("deepcopy", "dense"), ("save", "int4"), ("average", "dense")]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    cases = {
        **{name: ("lives", options) for name, options in THINGS.items()},
        "plain": ("lives", {"maker": "unclosable"}),
        "deadlines": ("deadlines", {}),
        **{("after", codec): ("closed_for_good", {"codec": codec}) for codec in ("int4", "dense")},
    }
    with Cases(tmp_path_factory.mktemp("lifetimes"), cases, 2, "tests.workers.lifetimes") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def answers_of_three(tmp_path_factory):
    cases = {name: ("lives", THINGS[name]) for name in OF_THREE}
    with Cases(tmp_path_factory.mktemp("three"), cases, 3, "tests.workers.lifetimes") as ranks:
        yield ranks


@pytest.mark.parametrize("thing", tiered(THINGS, first=FIRST))
def test_nothing_stays_of_what_was_deleted(answers, thing):
    for answer in without_error(answers[thing]):
        assert answer["deleted"] == {**NOTHING, "alive": []}


@pytest.mark.parametrize("thing", tiered(THINGS, first=FIRST))
def test_close_ends_threads_and_connections_at_once(answers, thing):
    for answer in without_error(answers[thing]):
        assert answer["closed"] == NOTHING
        assert answer["after"] == {**NOTHING, "alive": []}


@pytest.mark.full
@pytest.mark.parametrize("thing", OF_THREE)
def test_three_ranks_leave_nothing(answers_of_three, thing):
    for answer in without_error(answers_of_three[thing]):
        assert answer["closed"] == NOTHING
        assert answer["deleted"] == answer["after"] == {**NOTHING, "alive": []}


@pytest.mark.parametrize("codec", tiered([*COMPRESSIONS, "auto"], first=["int4", "dense"]))
def test_a_closed_compression_keeps_neither_the_model_nor_its_parameters(answers, codec):
    for answer in without_error(answers[codec]):
        assert answer["keeps"] == ["closes"]


@pytest.mark.parametrize(
    "codec", tiered(["int4", "gloo", "powersgd", "dense", "telemetry", "auto"], first=["int4", "dense"])
)
def test_a_model_is_freed_as_soon_as_plain_ddp_is(answers, codec):
    """Not only when Python's garbage collector comes by: until then memory of the size of the model would be lost."""
    for answer, plain in zip(without_error(answers[codec]), without_error(answers["plain"]), strict=True):
        assert answer["at_once"] == plain["at_once"] == []


@pytest.mark.full
def test_the_thread_of_deadlines_ends_with_them(answers):
    for answer in without_error(answers["deadlines"]):
        assert answer.pop("waiting") == ["gradwire-deadlines"]
        assert answer == NOTHING


@pytest.mark.parametrize("codec", ["int4", "dense"])
def test_training_after_close_is_an_error_and_what_was_kept_back_can_be_saved(answers, codec):
    for answer in without_error(answers["after", codec]):
        assert answer["said"] == "ConfigError: close() was called: nothing can be reduced any more."
        assert answer["same"]
        assert answer["moved"]


@pytest.fixture(scope="module", params=tiered([1, 2], first=[2]), ids=["one rank", "two ranks"])
def copies(request, tmp_path_factory):
    cases = {each: ("copies", dict(zip(("how", "codec"), each, strict=True))) for each in COPIES}
    with Cases(tmp_path_factory.mktemp("copies"), cases, request.param, "tests.workers.lifetimes") as ranks:
        yield ranks


@pytest.mark.parametrize(("how", "codec"), COPIES)
def test_a_copy_of_a_compressed_model_is_a_plain_one(copies, how, codec):
    for answer in same_on_every_rank(copies[how, codec]):
        assert answer["as_plain"]
        assert answer["hooks"] == [codec != "dense", 0]
        assert answer["rounds"] == 3  # the steps of the copy are not counted
        assert answer["each"] == [5, 2]
        assert answer["method"] == [codec, "int8"]
