"""The contest: each operation of ours, through the calls a user makes, beside its peers and the limit.

The limit is the time to copy the input into memory that is there already, for operations that write little (the thin
products) the time to read it. Operations and peers are listed in `_operations`; `run` times them all together.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.benchmarks import machine, peers
from gradwire.benchmarks.libraries import installed, libraries
from gradwire.benchmarks.peers import Parts, Peer
from gradwire.benchmarks.timing import Clock, CpuClock, CudaClock, Timing, interleaved
from gradwire.codecs import Codec, State, codec
from gradwire.codecs.randomk import RandomK
from gradwire.codecs.sparse import Sparse, kept_count
from gradwire.codecs.topk import TopK
from gradwire.errors import ConfigError
from gradwire.kernels import ops
from gradwire.transforms import Chain, ErrorFeedback
from gradwire.transforms.base import SenderTransform
from gradwire.wire import Key, Payload, TensorSpec

__all__ = ["GROUPS", "Notify", "Operation", "Report", "Result", "Settings", "minimal_bytes", "run"]

GROUPS: Final = {
    "feedback": "encode, error feedback",
    "encode": "encode",
    "decode": "decode",
    "decode_add": "decode and add",
    "decode_add_8": "decode and add 8",
    "select": "selection",
    "low_rank": "low rank",
    "rotate": "rotation",
}
"""Groups of operations by the name that chooses them."""

_FEEDBACK: Final = ("ef(int8)", "ef(int4)", "ef(sign)", "ef(fp8:e4m3)", "ef(topk:0.01)")
_ENCODE: Final = ("int8", "int4", "int3", "sign", "fp8:e4m3", "fp16", "qsgd:16", "topk:0.01", "randomk:0.01")
_DECODE: Final = ("int8", "int4", "sign", "topk:0.01")
_DECODE_8: Final = ("int8", "int4")

_BLOCK: Final = 1024  # tensors are whole blocks of this many elements: most peers cannot do others
_PEERS: Final = 8  # payloads of `decode_add_8`
_SIDE, _RANK = 4096, 4  # of the matrix of the low-rank operations, if the tensor is as large
_READS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "sum": torch.sum,
    "amax": torch.amax,
    "dot": lambda x: torch.dot(x.view(-1), x.view(-1)),
}


@dataclass(frozen=True)
class Settings:
    """What is measured, and how; None stands for the default of the device."""

    elements: int | None = None
    device: str = "cpu"
    threads: tuple[int, ...] = (1,)
    codecs: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    rounds: int = 11
    compile: bool = True

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"`--device` must be cpu or cuda; got {self.device!r}.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("`--device cuda` needs a CUDA device and a torch built for it; this torch sees none.")
        elements = self.elements
        if elements is None:
            elements = 25_000_000 if self.device == "cpu" else 1 << 27
        if not _BLOCK <= elements <= 1 << 30:
            raise ConfigError(f"`--elements` must be from {_BLOCK} to {1 << 30}; got {elements}.")
        object.__setattr__(self, "elements", elements - elements % _BLOCK)
        if not 1 <= self.rounds <= 1000:
            raise ConfigError(f"`--rounds` must be from 1 to 1000; got {self.rounds}.")
        if not self.threads or not all(1 <= count <= 1024 for count in self.threads):
            raise ConfigError(f"`--threads` must be from 1 to 1024; got {', '.join(map(str, self.threads))}.")
        object.__setattr__(self, "threads", tuple(dict.fromkeys(self.threads)) if self.device == "cpu" else (1,))
        for group in self.groups:
            if group not in GROUPS:
                raise ConfigError(f"`--op` must be one of {', '.join(GROUPS)}; got {group!r}.")
        object.__setattr__(self, "codecs", tuple(str(codec(name)) for name in self.codecs))

    @property
    def numel(self) -> int:
        """Elements of the tensor: what was asked for, down to whole blocks."""
        assert self.elements is not None
        return self.elements

    @property
    def side(self) -> int:
        """Rows and columns of the matrix of the low-rank operations."""
        return min(_SIDE, 1 << ((self.numel.bit_length() - 1) // 2))

    @property
    def warmup(self) -> int:
        """Rounds that are discarded."""
        return max(1, self.rounds // 5)


@dataclass(frozen=True)
class Operation:
    """One thing to do, by several contenders."""

    group: str
    name: str
    ours: Callable[[], object]
    peers: Mapping[str, Callable[[], object]]
    nbytes: int  # of the float32 tensor that goes in or comes out
    minimal_bytes: int  # each input read once, each output written once
    source: Literal["tensor", "matrix"] = "tensor"
    limit: Literal["copy", "read"] = "copy"


@dataclass(frozen=True)
class Result:
    """Times of one operation at one number of threads."""

    group: str
    name: str
    threads: int
    nbytes: int
    minimal_bytes: int
    limit: str  # "copy" or "read": which of the two the operation is held against
    ours: Timing
    copy: Timing
    read: Timing
    peers: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # peers that do not run here, and why

    @property
    def gb_s(self) -> float:
        """Float32 bytes that go in or come out, over our time."""
        return self.nbytes / self.ours.median_s / 1e9

    @property
    def limit_s(self) -> float:
        """Seconds of the limit."""
        return (self.copy if self.limit == "copy" else self.read).median_s

    def over_limit(self, contender: str | None = None) -> float | None:
        """Time of a peer, or ours, in units of the limit; None for a peer without a time."""
        timing = self.ours if contender is None else self.peers.get(contender)
        return None if timing is None else timing.median_s / self.limit_s

    @property
    def best_peer(self) -> str | None:
        """The fastest peer."""
        return min(self.peers, key=lambda name: self.peers[name].median_s, default=None)

    @property
    def swings(self) -> bool:
        """Whether the middle half of our rounds, or of the best peer's, spreads over a quarter of the median."""
        timings = [self.ours] + ([self.peers[self.best_peer]] if self.best_peer else [])
        return any(t.upper_quartile_s - t.lower_quartile_s > t.median_s / 4 for t in timings)

    @property
    def speedup(self) -> float | None:
        """Time of the fastest peer over ours."""
        return self.peers[self.best_peer].median_s / self.ours.median_s if self.best_peer else None

    @property
    def bandwidth_share(self) -> float:
        """Minimal bytes over our time, as a share of the bandwidth of the copy (which moves its bytes twice)."""
        return (self.minimal_bytes / self.ours.median_s) / (2 * self.nbytes / self.copy.median_s)

    def to_json(self) -> dict[str, Any]:
        """Everything, with the derived figures."""
        derived = {"gb_s": self.gb_s, "over_copy": self.ours.median_s / self.copy.median_s}
        derived |= {"over_read": self.ours.median_s / self.read.median_s, "bandwidth_share": self.bandwidth_share}
        peers = {
            name: asdict(timing)
            | {"over_copy": timing.median_s / self.copy.median_s, "over_ours": timing.median_s / self.ours.median_s}
            for name, timing in self.peers.items()
        }
        return {
            "group": self.group,
            "op": self.name,
            "threads": self.threads,
            "tensor_bytes": self.nbytes,
            "minimal_bytes": self.minimal_bytes,
            "limit": self.limit,
            "copy": asdict(self.copy),
            "read": asdict(self.read),
            "ours": asdict(self.ours) | derived,
            "peers": peers,
            "failed": self.failed,
            "best_peer": self.best_peer,
            "times_faster": self.speedup,
        }


@dataclass(frozen=True)
class Report:
    """Results, and all that is needed to take them again."""

    settings: Settings
    machine: dict[str, Any]
    results: list[Result]

    def to_json(self) -> dict[str, Any]:
        """One document."""
        settings = asdict(self.settings) | {"warmup": self.settings.warmup, "matrix_side": self.settings.side}
        return {"machine": self.machine, "settings": settings, "results": [r.to_json() for r in self.results]}


Notify = Callable[[str, int, int], None]  # what is being done, how much of it is, of how much


def run(settings: Settings, notify: Notify = lambda what, done, total: None) -> Report:
    """Time everything the settings ask for.

    >>> report = run(Settings(elements=4096, codecs=("int8",), groups=("encode",), rounds=1, compile=False))
    >>> [(result.name, sorted(result.peers)) for result in report.results]
    [('int8', ['eager', 'eager, tuned'])]
    """
    tensors = _Tensors(settings)
    operations = _chosen(settings, tensors)
    work = _limits(operations, tensors) | {_name(op, "ours"): op.ours for op in operations}
    candidates = {_name(op, peer): call for op in operations for peer, call in op.peers.items()}
    with _many_compilations() if settings.compile else nullcontext():
        running, failed = _those_that_run(candidates, settings.threads, notify)
        for call in work.values():  # an operation of ours that fails is a bug: no mercy
            call()
        total = settings.warmup + settings.rounds
        times = interleaved(
            work | running,
            rounds=settings.rounds,
            warmup=settings.warmup,
            clock=_clock(tensors.device),
            threads=settings.threads,
            on_round=lambda done: notify("timing", done, total),
        )
    results = [_result(op, count, times[count], failed) for count in settings.threads for op in operations]
    return Report(settings, _machine(settings), results)


def _clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def _machine(settings: Settings) -> dict[str, Any]:
    backends = sorted(set(kernels.available(settings.device).values()))
    return machine.describe(settings.device) | {"kernels": backends, "libraries": installed()}


def _name(op: Operation, contender: str) -> str:
    return f"{op.group} {op.name}: {contender}"


def _result(op: Operation, threads: int, times: Mapping[str, Timing], failed: Mapping[str, str]) -> Result:
    reads = (times[f"read {op.source}: {name}"] for name in _READS)
    return Result(
        group=op.group,
        name=op.name,
        threads=threads,
        nbytes=op.nbytes,
        minimal_bytes=op.minimal_bytes,
        limit=op.limit,
        ours=times[_name(op, "ours")],
        copy=times[f"copy {op.source}"],
        read=min(reads, key=lambda timing: timing.median_s),
        peers={peer: times[_name(op, peer)] for peer in op.peers if _name(op, peer) in times},
        failed={peer: failed[_name(op, peer)] for peer in op.peers if _name(op, peer) in failed},
    )


def _limits(operations: Sequence[Operation], tensors: _Tensors) -> dict[str, Callable[[], object]]:
    work: dict[str, Callable[[], object]] = {}
    for source in {op.source for op in operations}:
        x, target = (tensors.x, tensors.out) if source == "tensor" else (tensors.matrix, tensors.matrix_out)
        work[f"copy {source}"] = functools.partial(target.copy_, x)
        work |= {f"read {source}: {name}": functools.partial(reduce, x) for name, reduce in _READS.items()}
    return work


def _those_that_run(
    candidates: Mapping[str, Callable[[], object]], threads: Sequence[int], notify: Notify
) -> tuple[dict[str, Callable[[], object]], dict[str, str]]:
    """Run each peer once for each number of threads, which compiles it; those that fail, with the first line of why."""
    running, failed = dict(candidates), {}
    before = torch.get_num_threads()
    for done, (name, call) in enumerate(candidates.items()):
        notify("compiling" if name.endswith("compiled") else "trying peers", done, len(candidates))
        try:
            with warnings.catch_warnings():  # the compiler has advice to give
                warnings.simplefilter("ignore")
                for count in threads:  # compiled code is made for a number of threads
                    torch.set_num_threads(count)
                    call()
        except Exception as error:
            del running[name]
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        finally:
            torch.set_num_threads(before)
    return running, failed


def _many_compilations() -> Any:
    """One function serves several codecs and numbers of threads: more variants than torch expects of one function."""
    import torch._dynamo

    return torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024)


# The operations


class _Tensors:
    """The inputs and targets, each made when it is first needed."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.device = settings, torch.device(settings.device)
        self._residuals: dict[str, Tensor] = {}
        self._generator = torch.Generator(self.device).manual_seed(0)

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self._generator)

    @functools.cached_property
    def x(self) -> Tensor:
        return self._randn(self.settings.numel)

    @functools.cached_property
    def out(self) -> Tensor:
        return torch.empty_like(self.x)

    @functools.cached_property
    def acc(self) -> Tensor:
        return torch.zeros_like(self.x)

    @functools.cached_property
    def work(self) -> Tensor:
        return torch.empty(2, self.x.numel(), device=self.device)

    @functools.cached_property
    def matrix(self) -> Tensor:
        return self._randn(self.settings.side, self.settings.side)

    @functools.cached_property
    def matrix_out(self) -> Tensor:
        return torch.empty_like(self.matrix)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec.of(self.x)

    def thin(self) -> Tensor:
        return self._randn(self.settings.side, _RANK)

    def residual(self, codec_name: str) -> Tensor:
        """One for all peers of a codec: each leaves in it what the next can go on with."""
        return self._residuals.setdefault(codec_name, torch.zeros_like(self.x))


def _chosen(settings: Settings, tensors: _Tensors) -> list[Operation]:
    operations = list(_operations(settings, tensors))
    if not operations:
        raise ConfigError(
            "no operation is left: none of `--op` has one of `--codec`. "
            "feedback takes ef(...); select, low_rank and rotate take no codec."
        )
    return operations


def _operations(settings: Settings, tensors: _Tensors) -> Iterator[Operation]:
    wanted = set(settings.groups or GROUPS)
    chosen = [codec(name) for name in settings.codecs]

    def those(group: str, default: Sequence[str]) -> Iterator[Codec]:
        if group in wanted:
            yield from chosen if settings.codecs else map(codec, default)

    for c in those("feedback", _FEEDBACK):
        if isinstance(c, SenderTransform):
            yield _encode_feedback(c, tensors)
    for c in those("encode", _ENCODE):
        if not isinstance(c, SenderTransform):
            yield _encode(c, tensors)
    for c in those("decode", _DECODE):
        yield _decode(c, tensors)
    for c in those("decode_add", _DECODE):
        yield _decode_add(c, tensors, 1)
    for c in those("decode_add_8", _DECODE_8):
        yield _decode_add(c, tensors, _PEERS)
    if settings.codecs:
        return
    if "select" in wanted:
        yield _select(tensors)
    if "low_rank" in wanted:
        yield from _low_rank(tensors)
    if "rotate" in wanted:
        yield _rotate(tensors)


class _Keys:
    """A key of its own for each call, as for each step of a training."""

    def __init__(self) -> None:
        self._step = 0

    def __call__(self) -> Key:
        self._step += 1
        return Key(step=self._step)


class _Feedback:
    """An encode that goes on with the state of the last one, which is released."""

    def __init__(self, c: Codec, x: Tensor) -> None:
        self._codec, self._x, self._key = c, x, _Keys()
        self._state: State = c.init(TensorSpec.of(x), x.device)

    def __call__(self) -> Payload:
        payload, self._state = self._codec.encode(self._x, self._state, self._key())
        return payload


def _peers_of(c: Codec, tensors: _Tensors) -> dict[str, Peer]:
    """By name; those to be compiled are among them, uncompiled."""
    c = c.inner if isinstance(c, SenderTransform) else c
    found: dict[str, Peer] = {}
    forms = {
        "eager": peers.in_torch(c),
        "eager, tuned": peers.in_torch(c, tensors.work),
        "compiled": peers.in_torch(c, fused=True),
    }
    found |= {name: peer for name, peer in forms.items() if peer}
    for name, peer in libraries(c, tensors.device).items():
        found[name] = peer
        if peer.compiles:
            found[f"{name} compiled"] = peer
    return {name: p for name, p in found.items() if tensors.settings.compile or not name.endswith("compiled")}


def _calls(
    named: Mapping[str, Peer], method: str, arguments: Callable[[Peer], tuple[Any, ...]]
) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    for name, peer in named.items():
        function = getattr(peer, method)
        function = _compiled(function) if name.endswith("compiled") else function
        calls[name] = functools.partial(function, *arguments(peer))
    return calls


def _compiled(function: Callable[..., object]) -> Callable[..., object]:
    """Compiled at the first call, where it is allowed to fail."""
    compiled: list[Callable[..., object]] = []

    def call(*arguments: object) -> object:
        if not compiled:
            compiled.append(torch.compile(function, fullgraph=True, dynamic=False))
        return compiled[0](*arguments)

    return call


def minimal_bytes(group: str, c: Codec, spec: TensorSpec) -> int:
    """Bytes an operation of a codec cannot but move: each input read once, each output written once.

    >>> spec = TensorSpec((1024,))
    >>> minimal_bytes("encode", codec("int8"), spec), minimal_bytes("feedback", codec("ef(int8)"), spec)
    (5128, 13320)
    """
    tensor, body = 4 * spec.numel, c.layout(spec).body_nbytes
    if group in ("encode", "decode"):
        return tensor + body
    if group == "feedback":
        return 3 * tensor + body
    payloads = _PEERS if group == "decode_add_8" else 1
    c = c.inner if isinstance(c, SenderTransform) else c
    carrier = c.carrier if isinstance(c, Chain) else c
    changed = tensor  # of the sum: read and written
    if isinstance(carrier, Sparse | RandomK):
        changed = min(tensor, 4 * payloads * carrier._count(spec))
    return 2 * changed + payloads * body


def _selection(c: Codec, tensors: _Tensors) -> dict[str, Callable[[], object]]:
    """For top-k, ``torch.topk`` by itself: less than an encode, but the part of it that takes the time."""
    c = c.inner if isinstance(c, SenderTransform) else c
    if not isinstance(c, TopK):
        return {}
    count = kept_count(c.density, tensors.x.numel())
    return {"torch.topk only": functools.partial(peers.select_top, tensors.x, count, tensors.work[0])}


def _encode_feedback(c: Codec, tensors: _Tensors) -> Operation:
    x = tensors.x
    named = _peers_of(c, tensors) if isinstance(c, ErrorFeedback) and c.decay == 1 else {}
    named = {name: peer for name, peer in named.items() if peer.feedback}
    return Operation(
        "feedback",
        str(c),
        _Feedback(c, x),
        _calls(named, "encode_feedback", lambda peer: (x, tensors.residual(str(c)))) | _selection(c, tensors),
        x.nbytes,
        minimal_bytes("feedback", c, tensors.spec),
    )


def _encode(c: Codec, tensors: _Tensors) -> Operation:
    x, state, key = tensors.x, c.init(tensors.spec, tensors.device), _Keys()
    calls = _calls(_peers_of(c, tensors), "encode", lambda peer: (x,)) | _selection(c, tensors)
    return Operation(
        "encode", str(c), lambda: c.encode(x, state, key()), calls, x.nbytes, minimal_bytes("encode", c, tensors.spec)
    )


def _decode(c: Codec, tensors: _Tensors) -> Operation:
    x, out = tensors.x, tensors.out
    payload = _received(c.encode(x, c.init(tensors.spec, tensors.device))[0])
    parts = _encoded(c, tensors, 1)
    calls = _calls(_peers_of(c, tensors), "decode", lambda peer: (parts[type(peer)][0], out))
    return Operation(
        "decode", str(c), lambda: c.decode(payload, out), calls, x.nbytes, minimal_bytes("decode", c, tensors.spec)
    )


def _received(payload: Payload) -> Payload:
    """As it is after the wire: whether it is finite is known, not waiting on the device."""
    return replace(payload, nonfinite=payload.nonfinite.cpu())


def _decode_add(c: Codec, tensors: _Tensors, count: int) -> Operation:
    x, acc = tensors.x, tensors.acc
    keys = _Keys()
    payloads = [_received(c.encode(x, c.init(tensors.spec, tensors.device), keys())[0]) for _ in range(count)]
    parts = _encoded(c, tensors, count)
    calls = _calls(_peers_of(c, tensors), "decode_add", lambda peer: (parts[type(peer)], acc))
    group = "decode_add" if count == 1 else "decode_add_8"
    argument = payloads[0] if count == 1 else payloads
    return Operation(
        group,
        str(c),
        lambda: c.decode_add(argument, acc),
        calls,
        x.nbytes,
        minimal_bytes(group, c, tensors.spec),
    )


def _encoded(c: Codec, tensors: _Tensors, count: int) -> dict[type[Peer], list[Parts]]:
    """What each kind of peer would have received; each payload in memory of its own."""
    made: dict[type[Peer], list[Parts]] = {}
    for peer in _peers_of(c, tensors).values():
        if type(peer) not in made:
            parts = peer.encode(tensors.x)
            made[type(peer)] = [tuple(part.clone() for part in parts) for _ in range(count)]
    return made


def _select(tensors: _Tensors) -> Operation:
    x = tensors.x
    count = kept_count(0.01, x.numel())
    call = functools.partial(peers.select_top, x, count, tensors.work[0])
    return Operation(
        "select", "top 1%", lambda: ops.select_top(x, count), {"eager": call}, x.nbytes, x.nbytes + 8 * count
    )


def _low_rank(tensors: _Tensors) -> Iterator[Operation]:
    m, p, q = tensors.matrix, tensors.thin(), tensors.thin()
    thin = 2 * p.nbytes

    def contest(name: str, ours: Callable[[], object], functions: dict[str, Any], *arguments: Tensor) -> Operation:
        calls = {label: functools.partial(function, *arguments) for label, function in functions.items()}
        if tensors.settings.compile:
            calls["compiled"] = functools.partial(_compiled(functions["eager"]), *arguments)
        writes = name == "M - P @ Q.T"
        return Operation(
            "low_rank",
            name,
            ours,
            calls,
            m.nbytes,
            m.nbytes * (2 if writes else 1) + thin,
            "matrix",
            "copy" if writes else "read",
        )

    # Transposed: (Q.T @ M.T).T and (P.T @ M).T are the same products, and several times faster in torch on a CPU.
    products = {"eager": lambda m, q: m @ q, "eager, transposed": lambda m, q: (q.T @ m.T).T}
    yield contest("M @ Q", lambda: ops.thin_products([m], [q]), products, m, q)
    products = {"eager": lambda m, p: m.T @ p, "eager, transposed": lambda m, p: (p.T @ m).T}
    yield contest("M.T @ P", lambda: ops.thin_transposed_products([m], [p]), products, m, p)
    outer = {"eager": lambda m, p, q: torch.addmm(m, p, q.T, alpha=-1)}
    yield contest("M - P @ Q.T", lambda: ops.outer_residual([m], [p], [q]), outer, m, p, q)


def _rotate(tensors: _Tensors) -> Operation:
    x, key = tensors.x, _Keys()
    calls: dict[str, Callable[[], object]] = {
        "eager": functools.partial(peers.Rotation(tensors.device, tensors.work), x)
    }
    if tensors.settings.compile:
        calls["compiled"] = functools.partial(_compiled(peers.Rotation(tensors.device)), x)
    name = f"Hadamard {_BLOCK}"
    return Operation("rotate", name, lambda: ops.rotate(x, key(), _BLOCK), calls, x.nbytes, 2 * x.nbytes)
