"""What a method costs and loses: found out by doing it, to gradients of this very training."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from gradwire.collectives import AllReduce, Method, PowerSGD, method
from gradwire.collectives.base import ring_bytes
from gradwire.collectives.choose import is_elementwise
from gradwire.collectives.loopback import Loopback
from gradwire.planner.cost import Cost
from gradwire.reducer import SMALL, GradientReducer

__all__ = ["Trial", "dense_trial", "sample_of", "try_method"]

_MOST_RANKS: Final = 4  # that are played by threads; for more, costs are computed from theirs
_SAMPLE: Final = 1 << 18  # elements of a bucket that are tried, if whole tensors need not be


@dataclass(frozen=True)
class Trial:
    """What came of it."""

    cost: Cost
    errors: dict[str, float]  # by parameter: relative squared error of all that was sent so far


def sample_of(numels: Mapping[str, int]) -> list[str]:
    """The parameters of a bucket to try a method on: the first ones, and enough of them.

    >>> sample_of({"a": 200_000, "b": 400_000, "c": 1_000})
    ['a', 'b']
    """
    names: list[str] = []
    for name in numels:
        if sum(numels[each] for each in names) >= _SAMPLE:
            break
        names.append(name)
    return names


def dense_trial(names: Iterable[str], numel: int, ranks: int) -> Trial:
    """What is known of the all-reduce without trying.

    >>> dense_trial(["w"], numel=1000, ranks=2).cost.sent_bytes
    4000.0
    """
    return Trial(Cost(0.0, float(ring_bytes(numel, ranks)), 1, dense=True), dict.fromkeys(names, 0.0))


def try_method(
    what: str | Method,
    gradients: Sequence[Mapping[str, Tensor]],
    numel: int,
    ranks: int,
    *,
    known_processor_s: float | None = None,
) -> Trial:
    """Reduce gradients of a bucket, those of one step after another, among ranks that are threads of this process.

    ``numel`` is what the whole bucket has of such tensors. Steps after the first are timed for their cost, the last one
    again if none is known: whatever disturbs a measurement makes it larger, so the least is taken.

    >>> steps = [{"w": torch.randn(64, 64)} for _ in range(2)]
    >>> trial = try_method("int8", steps, numel=4096, ranks=2)
    >>> trial.cost.sent_bytes, trial.errors["w"] < 0.001
    (4208.0, True)
    """
    how = method(what)
    if isinstance(how, AllReduce):
        return dense_trial(gradients[0], numel, ranks)
    if not isinstance(how, PowerSGD) and is_elementwise(how):
        gradients = _thinned(gradients)
    played = min(ranks, _MOST_RANKS)
    sample = sum(each.numel() for each in gradients[0].values())
    sums: dict[str, Tensor] = {}
    again = known_processor_s is None or len(gradients) == 1
    timed = [*gradients, gradients[-1]] if again else gradients
    seconds, sents = list[float](), [0] * played

    def play(peers: Loopback, meet: threading.Barrier) -> None:
        parameters = {name: nn.Parameter(each, requires_grad=False) for name, each in gradients[0].items()}
        reducer = GradientReducer(parameters, how, peers)
        flat = torch.empty(sample)  # as DDP has it: the memory of all gradients, again in every step
        sizes = [each.numel() for each in parameters.values()]
        shapes = [each.shape for each in parameters.values()]
        pieces = [piece.view(shape) for piece, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
        for number, step in enumerate(timed):
            for piece, gradient in zip(pieces, step.values(), strict=True):
                piece.copy_(gradient)
            meet.wait()
            started = time.process_time()
            reducer.start(list(parameters), pieces, last=True, flat=flat).result()
            sents[peers.rank] = reducer.traffic.sent_bytes
            meet.wait()
            took = (time.process_time() - started) / played
            if peers.rank == 0 and number > 0:
                seconds.append(took)
            if peers.rank == 0 and number < len(gradients):
                for name, piece in zip(parameters, pieces, strict=True):
                    sums[name] = sums[name] + piece if name in sums else piece.clone()
            meet.wait()
        reducer.close()

    _in_threads(play, played)
    errors = {name: _relative_error(total, [step[name] for step in gradients]) for name, total in sums.items()}
    larger, sent = numel / sample, statistics.mean(sents)  # slices are not all equal
    to_all = not isinstance(how, PowerSGD) and not is_elementwise(how)  # every rank gets every other's payload
    crowd = ranks / played
    messages = (ranks - 1) / max(1, played - 1)  # to each other rank: a payload, or one of its slices
    share = messages if to_all else messages / crowd
    processor = min(seconds) * larger * (crowd if to_all else 1)
    least = processor if known_processor_s is None else min(processor, known_processor_s)
    return Trial(Cost(least, sent * larger * share, _rounds(how, ranks)), errors)


def _thinned(gradients: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Some rows of each tensor, from the first to the last.

    >>> (thin,) = _thinned([{"a": torch.zeros(2048, 256), "b": torch.zeros(1024, 512)}])
    >>> thin["a"].shape, thin["b"].shape
    (torch.Size([512, 256]), torch.Size([256, 512]))
    """
    every = max(1, sum(each.numel() for each in gradients[0].values()) // _SAMPLE)
    few = {name: -(-len(each) // every) * each[0].numel() < SMALL for name, each in gradients[0].items()}
    return [{name: each if few[name] else each[::every] for name, each in step.items()} for step in gradients]


def _rounds(how: Method, ranks: int) -> int:
    factors = how.factors if isinstance(how, PowerSGD) else how
    inner = 2 if ranks > 2 and not isinstance(factors, AllReduce) and is_elementwise(factors) else 1
    return 2 * inner if isinstance(how, PowerSGD) and not how.alternate else inner


def _in_threads(play: Callable[[Loopback, threading.Barrier], None], ranks: int) -> None:
    meet, errors = threading.Barrier(ranks), list[BaseException]()

    def run(peers: Loopback) -> None:
        torch.set_num_threads(1)
        try:
            play(peers, meet)
        except threading.BrokenBarrierError:
            pass  # of another's error
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(peers,), daemon=True) for peers in Loopback.ranks(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _relative_error(sent: Tensor, steps: Sequence[Tensor]) -> float:
    true = sum(steps[1:], steps[0])
    largest = true.abs().max()  # by which squares neither overflow nor vanish
    if not largest > 0:
        return 0.0
    return float(((sent - true) / largest).norm() / (true / largest).norm()) ** 2
