"""Laws of every built-in training, and the facts of each."""

import sysconfig
from itertools import islice
from pathlib import Path

import pytest
import torch

from gradwire import ConfigError
from gradwire.tasks import TASKS, CharLM, Digits, Task, Validation, charlm, digits

SMALL = {  # of every task, one that trains in a second
    "digits": lambda **settings: Digits(**{"batch_size": 32, **settings}),
    "charlm": lambda **settings: CharLM(
        **{"batch_size": 16, "context": 32, "width": 64, "layers": 2, "heads": 2, "learning_rate": 3e-3, **settings}
    ),
}


@pytest.fixture(params=SMALL)
def make(request):
    """The constructor of a small variant of every task in turn."""
    return SMALL[request.param]


def equal(batch, other):
    return all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(task, steps):
    """Losses and final weights of one rank."""
    model = task.model()
    optimizer = task.optimizer(model)
    losses = []
    for inputs, targets in islice(task.batches(0, 1), steps):
        optimizer.zero_grad()
        loss = task.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_every_task_is_known_by_its_name_and_tested_here():
    assert {name: task.name for name, task in TASKS.items()} == {"digits": "digits", "charlm": "charlm"}
    assert set(SMALL) == set(TASKS)


@pytest.mark.parametrize(("name", "parameters", "batch_size"), [("digits", 2_030_058, 32), ("charlm", 10_893_312, 4)])
def test_a_task_has_the_model_and_batch_it_promises(name, parameters, batch_size):
    task = TASKS[name]()
    assert isinstance(task, Task)
    assert sum(p.numel() for p in task.model().parameters()) == parameters
    inputs, targets = task.batch(0, 0, 2)
    assert len(inputs) == len(targets) == batch_size == TASKS[name].batch_size


def test_a_model_depends_on_the_seed_alone(make):
    state = torch.get_rng_state()
    first = weights(make(seed=3).model())
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(first, weights(make(seed=3, batch_size=2).model()))
    assert not torch.equal(first, weights(make(seed=4).model()))


def test_iteration_equals_random_access_by_step(make):
    task = make(seed=5, batch_size=128)
    steps = 2 * task.steps(4) + 1 if isinstance(task, Digits) else 5  # past the end of an epoch
    walked = list(islice(task.batches(1, 4), steps))
    for step in reversed(range(steps)):
        assert equal(make(seed=5, batch_size=128).batch(step, 1, 4), walked[step])
    assert equal(next(task.batches(1, 4, start=3)), walked[3])


def test_batches_differ_between_ranks_steps_and_seeds(make):
    task = make()
    batches = [task.batch(step, rank, 3) for step in range(3) for rank in range(3)] + [make(seed=1).batch(0, 0, 3)]
    for i, batch in enumerate(batches):
        assert not any(equal(batch, other) for other in batches[:i])


@pytest.mark.parametrize("step", [0, 7, 1000])
def test_the_ranks_together_train_on_the_batch_of_one(make, step):
    parts = [make(batch_size=8).batch(step, rank, 4) for rank in range(4)]
    together = tuple(torch.cat(column) for column in zip(*parts, strict=True))
    assert equal(together, make(batch_size=32).batch(step, 0, 1))


def test_a_few_steps_reduce_the_loss(make):
    task = make()
    before = task.validate(task.model())
    losses, model = train(task, 25)
    after = task.validate(model)
    assert losses[-1] < 0.75 * losses[0]
    assert after.loss < 0.75 * before.loss
    assert after.accuracy > before.accuracy


def test_equal_seeds_give_equal_runs_of_any_length(make):
    losses, model = train(make(seed=2), 6)
    again, same = train(make(seed=2), 6)
    assert losses == again
    assert torch.equal(weights(model), weights(same))
    assert train(make(seed=2), 3)[0] == losses[:3]
    assert train(make(seed=3), 3)[0] != losses[:3]


def test_validation_is_the_same_for_every_seed_and_leaves_no_gradient(make):
    model = make().model()
    reached = make().validate(model)
    assert reached == make(seed=9, batch_size=1).validate(model)
    assert isinstance(reached, Validation)
    assert 0 <= reached.accuracy <= 1
    assert all(p.grad is None for p in model.parameters())


def test_an_epoch_of_digits_shows_no_image_twice():
    task = Digits(batch_size=100, seed=4)
    assert task.steps(2) == 7
    shown = torch.cat([task._draw(step, 200) for step in range(7)])
    assert len(shown.unique()) == 1400
    assert not torch.equal(task._draw(7, 200), task._draw(0, 200))  # the next epoch has its own shuffle


def test_digits_are_shuffled_as_they_always_were():
    """Runs recorded before tasks had a protocol can be repeated: the order of images is theirs."""
    images, labels, *_ = digits._data()
    order = torch.randperm(1437, generator=torch.Generator().manual_seed(3 * 10_007 + 1))
    start = (2 * 2 + 1) * 32  # step 2 of epoch 1, rank 1 of 2
    expected = order[start : start + 32]
    assert equal(Digits(seed=3).batch(22 + 2, 1, 2), (images[expected], labels[expected]))


def test_targets_of_charlm_are_the_bytes_that_follow():
    text, following = CharLM(context=50).batch(3, 1, 2)
    assert text.dtype == following.dtype == torch.int64
    assert torch.equal(text[:, 1:], following[:, :-1])
    window = bytes([*text[0].tolist(), following[0, -1].item()])
    assert window in charlm._text().numpy().tobytes()[: -charlm._HELD_OUT_BYTES]


def test_charlm_predicts_from_the_past_only():
    model = SMALL["charlm"]().model()
    text = torch.randint(256, (1, 32))
    changed = text.clone()
    changed[0, 20:] = 7
    before, after = model(text), model(changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)


def test_charlm_validates_on_bytes_it_never_trains_on(monkeypatch):
    task = CharLM(context=32)
    text = torch.zeros(2_000_000, dtype=torch.uint8)
    text[-charlm._HELD_OUT_BYTES :] = 1
    monkeypatch.setattr(charlm, "_text", lambda: text)
    assert all(int(x.max()) == int(y.max()) == 0 for x, y in islice(task.batches(0, 50), 20))
    inputs, targets = task._held_out()
    assert int(inputs.min()) == int(targets.min()) == 1
    assert len(inputs) >= 16


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder that passes for the standard library's, and a way to put files in it."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(tmp_path)}[name])

    def put(name, content):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    return put


def test_the_text_is_the_librarys_own_sources_in_one_order_everywhere(library):
    for name in ("b.py", "a/z.py", "a.py", "B.py", "unittest/case.py"):
        library(name, f"{name}\r\n".encode() * 60_000)
    for name in (
        "test/a.py",
        "a/tests/b.py",
        "idlelib/idle_test/c.py",
        "site-packages/torch/d.py",
        "config-3.11-x86_64/python-config.py",
        "_sysconfigdata__linux.py",
        "sitecustomize.py",
        "a.txt",
    ):
        library(name, b"not of the library")
    text = charlm._text().numpy().tobytes()
    names = ("B.py", "a.py", "a/z.py", "b.py", "unittest/case.py")
    assert text == b"".join(f"{name}\n".encode() * 60_000 for name in names)


def test_the_text_ends_at_twelve_megabytes(library):
    for name in ("a.py", "b.py", "c.py"):
        library(name, name[:1].encode() * 7_000_000)
    text = charlm._text()
    assert len(text) == 12_000_000
    assert int(text[-1]) == ord("b")


@pytest.mark.parametrize("files", [0, 1])
def test_a_python_without_sources_is_told_what_to_use(library, tmp_path, files):
    for _ in range(files):
        library("os.py", b"pass\n" * 100)
    with pytest.raises(ConfigError, match=r"1,000,000 bytes of them; .* has (0|500)\. .* is zipped or stripped: use"):
        CharLM().load()


def test_load_is_quiet_where_nothing_is_missing(make):
    make().load()
    assert Path(sysconfig.get_path("stdlib")).is_dir()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": -1}, r"\(seed=\.\.\.\)` must be from 0 to 2147483647; got -1\."),
        ({"seed": 1 << 31}, r"\(seed=\.\.\.\)` must be from 0 to 2147483647"),
        ({"batch_size": 0}, r"\(batch_size=\.\.\.\)` must be at least 1; got 0\."),
        ({"learning_rate": 0.0}, r"\(learning_rate=\.\.\.\)` must be positive and finite; got 0\.0\."),
        ({"learning_rate": float("nan")}, r"\(learning_rate=\.\.\.\)` must be positive and finite; got nan\."),
    ],
)
def test_a_wrong_argument_is_told_what_is_allowed(task, settings, message):
    with pytest.raises(ConfigError, match=f"^`{task}{message}"):
        TASKS[task](**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 5}, r"`charlm\(width=\.\.\.\)` must be a positive multiple of 5 heads; got 384\."),
        ({"heads": 0}, r"`charlm\(heads=\.\.\.\)` must be at least 1; got 0\."),
        ({"layers": 0}, r"`charlm\(layers=\.\.\.\)` must be at least 1; got 0\."),
        ({"context": 0}, r"`charlm\(context=\.\.\.\)` must be from 1 to 6249; got 0\."),
        ({"context": 10_000}, r"`charlm\(context=\.\.\.\)` must be from 1 to 6249; got 10000\."),
    ],
)
def test_a_model_that_cannot_be_is_told_why(settings, message):
    with pytest.raises(ConfigError, match=message):
        CharLM(**settings)


def test_more_examples_than_there_are_is_an_error_that_says_how_many(make):
    task = make(batch_size=100_000)
    most = task.train_examples // 2
    message = rf"^`{task.name}\(batch_size=\.\.\.\)` must be at most {most} with 2 ranks; got 100000\."
    with pytest.raises(ConfigError, match=message):
        task.steps(2)
    with pytest.raises(ConfigError, match=message):
        task.batch(0, 0, 2)


@pytest.mark.parametrize(
    ("step", "rank", "ranks", "message"),
    [
        (-1, 0, 1, "`step` must not be negative; got -1."),
        (0, 2, 2, "`rank` must be from 0 to 1 with 2 ranks; got 2."),
        (0, -1, 2, "`rank` must be from 0 to 1 with 2 ranks; got -1."),
    ],
)
def test_a_rank_that_is_not_there_has_no_batch(make, step, rank, ranks, message):
    with pytest.raises(ConfigError) as error:
        make().batch(step, rank, ranks)
    assert str(error.value) == message


def test_no_ranks_have_no_steps(make):
    with pytest.raises(ConfigError, match="`ranks` must be at least 1; got 0"):
        make().steps(0)
