"""A rank that trains DDP models, case after case; what it saw of each goes to a file of its own."""

import gc
import math
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint as computed_again

import gradwire
from gradwire import ConfigError, NonFiniteError, PeerError
from gradwire.collectives import hierarchical as hosts

from .base import main_of_cases

SMALL_BUCKETS = 0.03  # MiB: about 7800 parameters
TIMEOUT_S = 20


class Net(nn.Module):
    """27 834 parameters; four of its matrices are large enough to be compressed by themselves, and the fifth is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in [(32, 160), (160, 64), (64, 96), (96, 64), (64, 10)])

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Recomputing(Net):
    """Its layers are computed again in a backward inside the backward."""

    def forward(self, x):
        x = x.requires_grad_()
        for layer in self.layers[:-1]:
            x = torch.tanh(computed_again(layer, x, use_reentrant=True))
        return computed_again(self.layers[-1], x, use_reentrant=True)


class Mixed(nn.Module):
    """A layer in bfloat16 between layers and a norm in float32."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(32, 160), nn.LayerNorm(64), nn.Linear(64, 10)
        self.middle = nn.Linear(160, 64).bfloat16()

    def forward(self, x):
        return self.last(self.norm(self.middle(torch.tanh(self.first(x)).bfloat16()).float()))


class Branches(nn.Module):
    """The middle of it is used on some steps only, and then perhaps not on every rank."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(32, 160), nn.Linear(160, 160), nn.Linear(160, 10)

    def forward(self, x, middle):
        x = torch.tanh(self.first(x))
        if middle:
            x = torch.tanh(self.middle(x))
        return self.last(x)


def batch(step, rank, size=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 32, generator=generator)
    return x, x[:, :10].argmax(dim=1)


def loss_of(model, step, rank, *arguments):
    x, target = batch(step, rank)
    return nn.functional.cross_entropy(model(x, *arguments), target)


def ddp(model=None, **options):
    return DistributedDataParallel(model if model is not None else Net(), **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def compressed(codec, model=None, *, seed=0, scaler=None, nonfinite=None, **options):
    model = ddp(model, **options)
    return model, gradwire.compress(model, codec, seed=seed, scaler=scaler, nonfinite=nonfinite, timeout_s=TIMEOUT_S)


def sgd(model, lr=0.05, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


def train(model, optimizer, steps, rank, *, loss=loss_of):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        value = loss(model, step, rank)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def checksum(tensors):
    total = 0
    for tensor in tensors:
        total = zlib.crc32(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), total)
    return f"{total:08x}"


def parameters(model):
    return checksum(model.parameters())


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def hooks(model):
    """How many hooks DDP's reducer has."""
    return int("comm_hook" in model._get_ddp_logging_data())


def distance(these, those):
    return max(float((a - b).abs().max()) for a, b in zip(these, those, strict=True))


def residuals(compression):
    """Tensors of the state, in units of the loss."""
    state = compression.state_dict()
    return [
        value / state["scale"]
        for name in sorted(state["states"])
        for value in state["states"][name].values()
        if isinstance(value, torch.Tensor)
    ]


# The cases. Each returns something for JSON.


def hierarchical(rank, name, steps=30):
    """Train as if even and odd ranks were on two hosts."""
    model = ddp(bucket_cap_mb=0.06)
    own = hosts._host
    hosts._host = lambda: f"host {rank % 2}"
    try:
        compression = gradwire.compress(model, name, hierarchical=True, timeout_s=TIMEOUT_S)
    finally:
        hosts._host = own
    losses = train(model, sgd(model), range(steps), rank)
    compression.close()
    return {"hosts": compression._reducer.hosts, "after": parameters(model), "first": losses[0], "last": losses[-1]}


def codec(rank, name, steps=200):
    """Train with a codec."""
    model, compression = compressed(name, bucket_cap_mb=0.06)
    before = parameters(model)
    losses = train(model, sgd(model), range(steps), rank)
    traffic = compression.traffic
    compression.close()
    return {
        "before": before,
        "after": parameters(model),
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "sent": traffic.sent_bytes,
        "dense": traffic.dense_sent_bytes,
    }


def same_as_plain(rank, name="none", **options):
    """Gradients of a method that loses nothing beside plain DDP's, over steps of the same parameters."""
    plain, (ours, _) = ddp(**options), compressed(name, **options)
    optimizers = [sgd(plain), sgd(ours)]
    worst, norms = 0.0, []
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model, step, rank).backward()
        worst = max(worst, distance(gradients(plain), gradients(ours)))
        norms.append([float(nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (plain, ours)])
        worst = max(worst, distance(gradients(plain), gradients(ours)))
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "norms": norms, "parameters": parameters(ours), "hooks": hooks(ours)}


def accumulation(rank, name):
    """Gradients over two backwards without synchronization and one with it."""
    plain, (ours, compression) = ddp(), compressed(name)
    worst = 0.0
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            with model.no_sync():
                loss_of(model, 10 * step, rank).backward()
                loss_of(model, 10 * step + 1, rank).backward()
            loss_of(model, 10 * step + 2, rank).backward()
        worst = max(worst, distance(gradients(plain), gradients(ours)))
    return {"worst": worst, "step": compression.state_dict()["step"]}


def unused(rank, name):
    """A branch used on some steps, by all ranks, by one, by none."""
    plain = ddp(Branches(), find_unused_parameters=True)
    ours, _ = compressed(name, Branches(), find_unused_parameters=True)
    optimizers = [sgd(plain), sgd(ours)]
    worst, missing = 0.0, []
    for step, used in enumerate([True, rank == 1, False, True, rank == 0, False, True]):
        for model in (plain, ours):
            model.zero_grad()
            loss_of(model, step, rank, used).backward()
        have = [[p.grad is not None for p in model.parameters()] for model in (plain, ours)]
        missing.append(have[0] == have[1])
        if name in ("none", "dense"):
            pairs = zip(plain.parameters(), ours.parameters(), strict=True)
            worst = max(worst, *(float((p.grad - q.grad).abs().max()) for p, q in pairs if p.grad is not None))
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "missing": all(missing), "parameters": parameters(ours)}


def unused_loses_nothing(rank, ranks):
    """What the residuals of a branch hold is not lost on steps that use it on no rank."""
    model, compression = compressed("ef(topk:0.01)", Branches(), find_unused_parameters=True)
    name, weight = "middle.weight", model.module.middle.weight
    kept = []
    for step, used in enumerate([True, False]):
        model.zero_grad(set_to_none=True)
        loss_of(model, step, rank, used).backward()
        got = torch.zeros_like(weight) if weight.grad is None else weight.grad
        state = compression.state_dict()["states"][name]
        total = state["residual"].double().view(-1)
        at = state["owned_from"]
        total[at : at + len(state["owned"])] += ranks * state["owned"]
        dist.all_reduce(total)
        kept.append(total / ranks + got.double().view(-1))
    # On the second step the true gradient is zero: what was kept before it, is applied or still kept after it.
    before, after = kept[0] - first_mean(model, rank, ranks, name), kept[1]
    return {"before": float(before.norm()), "lost": float((after - before).norm())}


def first_mean(model, rank, ranks, name):
    """What the first step of that branch applied."""
    again, _ = compressed("ef(topk:0.01)", Branches(), find_unused_parameters=True)
    loss_of(again, 0, rank, True).backward()
    return dict(again.module.named_parameters())[name].grad.double().view(-1)


def options(rank, **given):
    """Trained with an option of DDP."""
    model, compression = compressed("ef(int4)", **given)
    losses = train(model, sgd(model), range(30), rank)
    return {
        "parameters": parameters(model),
        "first": losses[0],
        "last": losses[-1],
        "sent": compression.traffic.sent_bytes,
    }


def mixed(rank, name, **given):
    """Trained with parameters of two dtypes."""
    model, compression = compressed(name, Mixed(), **given)
    losses = train(model, sgd(model), range(30), rank)
    return {
        "parameters": parameters(model),
        "first": sum(losses[:5]),
        "last": sum(losses[-5:]),
        "steps": compression.rounds,
        "sent": compression.traffic.sent_bytes,
    }


def rebuild(rank, ranks):
    """DDP puts parameters in other buckets after the first step; residuals go with them, and nothing is lost.

    Parameters stay as they are, so the true mean of every step is plain DDP's.
    """
    plain, (ours, compression) = ddp(), compressed("ef(topk:0.05)")
    names = [name for name, _ in ours.module.named_parameters()]
    applied = dict.fromkeys(names, 0.0)
    true = dict.fromkeys(names, 0.0)
    plans = []
    for step in range(4):
        for model, total in ((plain, true), (ours, applied)):
            model.zero_grad()
            loss_of(model, step, rank).backward()
            for name, p in model.module.named_parameters():
                total[name] = total[name] + p.grad.double().view(-1)
        plans.append([list(names) for names in compression._reducer._plans])
    state = compression.state_dict()["states"]
    worst = 0.0
    for name in names:
        kept = torch.zeros_like(true[name])
        if name in state:
            kept += state[name]["residual"].view(-1)
            at = state[name]["owned_from"]
            kept[at : at + len(state[name]["owned"])] += ranks * state[name]["owned"]
        dist.all_reduce(kept)
        worst = max(worst, float((true[name] - applied[name] - kept / ranks).abs().max()))
    return {"worst": worst, "rebuilt": plans[0] != plans[1], "sections": len(state), "buckets": len(plans[1])}


def scaler(rank, ranks):
    """An Inf on one rank: every rank skips the step, and keeps its residuals."""
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, compression = compressed("ef(topk:0.05)", scaler=grad_scaler)
    optimizer = sgd(model)

    def step(number, bad=False):
        optimizer.zero_grad()
        loss = loss_of(model, number, rank)
        grad_scaler.scale(loss * torch.inf if bad else loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()

    for number in range(3):
        step(number)
    before, kept, scale = parameters(model), residuals(compression), grad_scaler.get_scale()
    step(3, bad=rank == 1)
    skipped, left, backed_off = parameters(model), residuals(compression), grad_scaler.get_scale()
    step(4)
    return {
        "skipped": before == skipped,
        "kept": all(map(torch.equal, kept, left)),
        "some": any(bool(each.any()) for each in kept),
        "scales": [scale, backed_off],
        "went_on": parameters(model) != skipped,
        "parameters": parameters(model),
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
    }


def autocast(rank):
    model, _ = compressed("int4")

    def loss(model, step, rank):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, step, rank)

    losses = train(model, sgd(model, lr=0.2), range(60), rank, loss=loss)
    return {"parameters": parameters(model), "first": losses[0], "last": sum(losses[-5:]) / 5}


def half(rank, dtype):
    """Parameters that are of that dtype throughout."""
    model, _ = compressed("int4", Net().to(getattr(torch, dtype)))

    def loss(model, step, rank):
        x, target = batch(step, rank)
        return nn.functional.cross_entropy(model(x.to(getattr(torch, dtype))).float(), target)

    losses = train(model, sgd(model, lr=0.2), range(60), rank, loss=loss)
    return {"parameters": parameters(model), "first": losses[0], "last": sum(losses[-5:]) / 5}


def uneven(rank, ranks, name):
    """Rank r has 3 + 2r steps, one of them after the buckets were rebuilt."""
    model, _ = compressed(name)
    optimizer = sgd(model)
    with Join([model]):
        losses = train(model, optimizer, range(3 + 2 * rank), rank)
    return {"parameters": parameters(model), "steps": len(losses), "finite": all(map(math.isfinite, losses))}


def uneven_beside_plain(rank, ranks, name, by_initial):
    """Rank r has 2 + 2r steps; the last one's gradients and parameters beside plain DDP's."""
    plain, (ours, _) = ddp(), compressed(name)
    for model in (plain, ours):
        optimizer = sgd(model)
        with Join([model], divide_by_initial_world_size=by_initial):
            train(model, optimizer, range(2 + 2 * rank), rank)
    moved = distance(ours.parameters(), Net().parameters())
    return {"worst": distance(plain.parameters(), ours.parameters()), "moved": moved, "parameters": parameters(ours)}


class Complex(nn.Module):
    """Layers of complex numbers, as Fourier operators have them, between real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(32, 96), nn.Linear(64, 10)
        self.spectral = nn.Parameter(0.1 * torch.randn(96, 64, dtype=torch.complex64))
        self.phase = nn.Parameter(torch.zeros(64, dtype=torch.complex64))

    def forward(self, x):
        return self.last((torch.tanh(self.first(x)).to(self.spectral.dtype) @ self.spectral + self.phase).abs())


def unusual(rank, what, name, **given):
    """The gradients of a model of unusual parameters beside plain DDP's, over steps of the same parameters."""
    makers = {"complex": Complex, "mixed": Mixed, "float64": lambda: Net().double()}
    plain, ours = (ddp(makers[what](), **given) for _ in range(2))
    gradwire.compress(ours, name, timeout_s=TIMEOUT_S)
    optimizers = [sgd(plain), sgd(ours)]
    worst = 0.0
    for step in range(4):
        for model in (plain, ours):
            model.zero_grad()
            x, target = batch(step, rank)
            dtype = torch.float64 if what == "float64" else torch.float32
            nn.functional.cross_entropy(model(x.to(dtype)), target).backward()
        pairs = zip(gradients(plain), gradients(ours), strict=True)
        worst = max(worst, *(float((a - b).norm() / a.norm()) for a, b in pairs))
        for optimizer in optimizers:
            optimizer.step()
    return {"worst": worst, "parameters": parameters(ours)}


class Adapted(nn.Module):
    """A linear layer that stays as it is, with an adapter of rank 8, as LoRA has it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class AdaptedTransformer(nn.Module):
    """Two layers with 32 adapter matrices; 26 of them have 2,048 elements, and 6 have 8,192."""

    def __init__(self, width=256, inside=1024):
        super().__init__()
        torch.manual_seed(0)
        shapes = dict.fromkeys(("q", "k", "v", "o", "mix"), (width, width))
        shapes |= {"gate": (width, inside), "rise": (width, inside), "fall": (inside, width)}
        self.layers = nn.ModuleList(nn.ModuleDict({n: Adapted(*s) for n, s in shapes.items()}) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            q, k, v = (layer[name](norm(x)) for name in "qkv")
            x = x + layer["o"](nn.functional.scaled_dot_product_attention(q, k, v))
            x = x + layer["fall"](torch.sigmoid(layer["gate"](x)) * layer["rise"](x)) + layer["mix"](x)
        return x


def adapters(rank, name, steps=40):
    """Losses of plain DDP and of a codec that train the same adapters, and what a step sent."""
    losses, generator = [], torch.Generator().manual_seed(9)
    turn = torch.linalg.qr(torch.randn(256, 256, generator=generator))[0]
    plain, ours = (DistributedDataParallel(AdaptedTransformer()) for _ in range(2))
    compression = gradwire.compress(ours, name, timeout_s=TIMEOUT_S)
    for model in (plain, ours):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        losses.append([])
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(2, 8, 256, generator=generator.manual_seed(100 * step + rank))
            loss = (model(x) - x @ turn).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    traffic, sizes = compression.traffic, [p.numel() for p in ours.parameters() if p.requires_grad and p.dim() > 1]
    small = sum(size < 4096 for size in sizes)
    sent = traffic.sent_bytes / traffic.dense_sent_bytes
    return {"plain": losses[0], "ours": losses[1], "small": [small, len(sizes)], "sent": sent, "end": parameters(ours)}


def refused_models(rank):
    """What is said of models whose gradients cannot be compressed, by what is wrong with them."""

    def refusal(make, codec="int4"):
        try:
            gradwire.compress(make(), codec, timeout_s=TIMEOUT_S)
        except ConfigError as error:
            return str(error)
        return "no error"

    def sparse(kind=nn.Embedding, ignored=()):
        module = nn.Sequential(kind(100, 64, sparse=True), nn.Linear(64, 80))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, list(ignored))
        return ddp(module)

    def delayed():
        net = Net().double()
        names = {"delay_all_reduce_named_params": [("layers.0.bias", net.layers[0].bias)]}
        return ddp(net, **names, param_to_hook_all_reduce=net.layers[0].weight)

    def in_python():
        torch._dynamo.config.optimize_ddp = "python_reducer"
        try:
            return ddp(bucket_cap_mb=1)
        finally:
            torch._dynamo.config.optimize_ddp = True

    def skipping():
        return ddp(find_unused_parameters=True, skip_all_reduce_unused_params=True)

    def mixed():
        policy = _MixedPrecision(param_dtype=torch.bfloat16)
        if torch.version.cuda and not torch.cuda.is_available():  # where torch cannot make the stream of such a model
            model = ddp()
            model.mixed_precision = policy
            return model
        return ddp(mixed_precision=policy)

    return {
        **{f"sparse, {codec}": refusal(sparse, codec) for codec in ("dense", "auto", "int4", "powersgd:2")},
        "a sparse bag": refusal(lambda: sparse(nn.EmbeddingBag)),
        "sparse, but ignored": refusal(lambda: sparse(ignored=["0.weight"])),
        **{f"float64, {codec}": refusal(lambda: ddp(Net().double()), codec) for codec in ("none", "auto")},
        **{f"float64 and delayed, {codec}": refusal(delayed, codec) for codec in ("dense", "int4")},
        "python_reducer": refusal(in_python),
        "mixed_precision": refusal(mixed),
        **{f"skipping, {codec}": refusal(skipping, codec) for codec in ("dense", "int4")},
    }


def failing(rank, how):
    """A hook that fails on rank 1 in its third step: an error there, another on all others, and none of them hangs."""
    model, compression = compressed("ef(topk:0.05)", find_unused_parameters=True)
    optimizer, reducer, errors = sgd(model), compression._reducer, []
    train(model, optimizer, range(2), rank)
    kept = residuals(compression)

    def fail(*arguments, **more):
        raise ZeroDivisionError("as planned")

    if rank == 1 and how == "start":
        reducer.on_gradient.append(lambda name, gradient: fail() if name == "layers.1.weight" else None)
    elif rank == 1 and how == "encode":
        for section in reducer._plan(next(names for names in reducer._plans if "layers.1.weight" in names)):
            object.__setattr__(section.collective, "reduce", fail)
    began = time.monotonic()
    for step in (2, 3):
        try:
            train(model, optimizer, [step], rank)
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    took = time.monotonic() - began
    same = all(map(torch.equal, kept, residuals(compression)))
    compression.close()
    return {"errors": errors, "seconds": took, "kept": same}


def compiled(rank, where):
    """torch.compile, of the module in DDP or of DDP."""
    torch._dynamo.reset()
    buckets = {"bucket_cap_mb": 1}  # dynamo wants no bucket below DDP's first of 1 MiB
    if where == "before":  # and used already
        model = ddp(**buckets)
        called = torch.compile(model, backend="aot_eager")
        loss_of(called, 0, rank).backward()
        compression = gradwire.compress(called, "none", timeout_s=TIMEOUT_S)
    elif where == "inside":
        model, compression = compressed("none", torch.compile(Net(), backend="aot_eager"), **buckets)
        called = model
    else:
        model, compression = compressed("none", **buckets)
        called = torch.compile(model, backend="aot_eager")
    eager = ddp()
    worst = 0.0
    for step in range(3):
        for each in (called, eager):
            each.zero_grad()
            loss_of(each, step, rank).backward()
        worst = max(worst, distance(gradients(model), gradients(eager)))
    return {
        "worst": worst,
        "sent": compression.traffic.sent_bytes,
        "names": sorted(compression._reducer.parameters)[:1],
    }


def checkpoint(rank, name, folder, **options):
    """8 steps at once; and 4, a checkpoint through a file, and 4 more in new objects."""
    model, _ = compressed(name, seed=3, **options)
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, range(8), rank)
    at_once = [p.detach().clone() for p in model.parameters()]

    model, compression = compressed(name, seed=3, **options)
    optimizer = sgd(model, momentum=0.9)
    train(model, optimizer, range(4), rank)
    file = Path(folder) / f"checkpoint-{rank}"
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "compression": compression.state_dict()}
    torch.save(saved, file)
    compression.close()

    loaded = torch.load(file, weights_only=True)
    model, compression = compressed(name, seed=3, **options)
    optimizer = sgd(model, momentum=0.9)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    compression.load_state_dict(loaded["compression"])
    train(model, optimizer, range(4, 8), rank)
    resumed = list(model.parameters())
    return {
        "same": all(map(torch.equal, at_once, resumed)),
        "distance": distance(at_once, resumed),
        "moved": distance(at_once, Net().parameters()),
        "parameters": parameters(model),
    }


def nonfinite(rank, name, recomputing=False, mixed=False, at=2, **options):
    """NaN on one rank in a step, the third if not told: raised on every rank, and training goes on."""
    model, _ = compressed(name, Recomputing() if recomputing else Mixed() if mixed else None, **options)
    optimizer = sgd(model)
    errors = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        try:
            (loss * torch.nan if step == at and rank == 1 else loss).backward()
        except NonFiniteError as error:
            errors.append([step, str(error)])
            continue
        optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    return {"errors": errors, "parameters": parameters(model), "finite": finite}


def propagated(rank, name):
    """NaN on one rank becomes NaN on all."""
    model, compression = compressed(name, nonfinite="propagate")
    for step in range(3):  # the buckets are rebuilt meanwhile
        model.zero_grad()
        loss_of(model, step, rank).backward()
    kept = residuals(compression)
    model.zero_grad()
    loss = loss_of(model, 3, rank)
    (loss * torch.nan if rank == 2 else loss).backward()
    nan = [bool(p.grad.isnan().all()) for p in model.parameters()]
    return {"nan": all(nan), "kept": all(map(torch.equal, kept, residuals(compression)))}


def only_small(rank, name):
    """A model without a matrix worth compressing."""
    torch.manual_seed(0)
    plain, layer = DistributedDataParallel(nn.Linear(8, 4)), nn.Linear(8, 4)
    layer.load_state_dict(plain.module.state_dict())
    ours = DistributedDataParallel(layer)
    gradwire.compress(ours, name, timeout_s=TIMEOUT_S)
    for model in (plain, ours):
        for step in range(2):
            model.zero_grad()
            model(torch.full((2, 8), rank + step + 1.0)).square().mean().backward()
    return {"worst": distance(gradients(plain), gradients(ours)), "largest": float(gradients(plain)[0].abs().max())}


def disagreement(rank):
    try:
        compressed("int8" if rank == 1 else "int4")
    except PeerError as error:
        return str(error)
    return "no error"


def refusals(rank):
    """What is said of bad arguments, by their names."""

    def refusal(model, **settings):
        try:
            gradwire.compress(model, "int4", **settings)
        except ConfigError as error:
            return str(error)
        return "no error"

    bad = {"feedback": "yes", "hierarchical": 1, "scaler": "x", "timeout_s": "5", "seed": -1, "nonfinite": "ignore"}
    said = {name: refusal(DistributedDataParallel(Net()), **{name: value}) for name, value in bad.items()}
    model, _ = compressed("int4")
    return {**said, "model": refusal(Net()), "twice": refusal(model)}


def closed(rank):
    model, compression = compressed("int4")
    compression.close()
    try:
        loss_of(model, 0, rank).backward()
    except ConfigError as error:
        return str(error)
    return "no error"


def traffic_is_the_last_steps(rank):
    model, compression = compressed("int4")
    loss_of(model, 0, rank).backward()
    before = compression.traffic.sent_bytes
    compression.state_dict()
    return [before, compression.traffic.sent_bytes]


def planned(rank, steps=30, settings=None):
    """Train with ``auto``, save in the middle, and go on from there beside the one that was not saved."""
    auto = gradwire.Auto(**settings) if settings else "auto"
    model, compression = compressed(auto, bucket_cap_mb=0.06)
    optimizer = sgd(model)
    losses = train(model, optimizer, range(steps), rank)
    plan, state = compression.plan, compression.state_dict()
    other, again = compressed(auto, bucket_cap_mb=0.06)
    other.module.load_state_dict(model.module.state_dict())
    again.load_state_dict(state)
    went_on = again.plan == plan and again._autopilot.settled == compression._autopilot.settled
    train(model, optimizer, range(steps, steps + 3), rank)
    train(other, sgd(other), range(steps, steps + 3), rank)
    methods = compression._reducer.methods
    compression.hold("none")
    train(model, optimizer, range(steps + 3, steps + 5), rank)
    held = compression._reducer.methods
    result = {"after": parameters(model), "plan": plan.methods, "went_on": went_on, "assigned": methods}
    result |= {"events": [each.what for each in compression.events], "method": compression.method, "held": held}
    result |= {"first": losses[0], "last": losses[-1], "settled": plan.measured_s is not None}
    result |= {"other": parameters(other) if went_on else "", "saved": sorted(state)}
    compression.close()
    again.close()
    return result


def taken_over(rank, steps=20):
    """DDP's own all-reduce, nobody holding on to what watches it, until gradients travel otherwise."""
    model = ddp(bucket_cap_mb=0.06)
    settings = gradwire.Auto(quality=0.0, patience_s=1000.0)
    gradwire.compress(model, settings, timeout_s=TIMEOUT_S)
    gc.collect()
    plain, optimizers = ddp(bucket_cap_mb=0.06), []
    for each in (model, plain):
        optimizers.append(sgd(each))
        train(each, optimizers[-1], range(steps), rank)
    same, registered = parameters(model) == parameters(plain), [hooks(model)]
    compression = model._gradwire.compression
    watched = compression.rounds, [len(bucket.names) for bucket in compression._autopilot._times[-1].buckets]
    sent = compression.traffic.sent_bytes
    state = compression.state_dict()
    compression.hold("int4")
    registered.append(hooks(model))
    train(model, optimizers[0], range(steps, 2 * steps), rank)
    after = compression.rounds, compression.traffic.sent_bytes < sent
    again, resumed = compressed(settings, bucket_cap_mb=0.06)
    resumed.load_state_dict(state)
    registered.append(hooks(again))
    train(again, sgd(again), range(2), rank)
    told = {"same": same, "hooks": registered, "watched": watched, "after": after, "resumed": resumed.rounds}
    return told | {"parameters": parameters(model)}


def ignored(rank, name, steps=4):
    """Parameters that DDP was told to leave alone, beside plain DDP; NaN in one of the others is found all the same."""

    def make():
        net = Net()
        names = ["layers.0.weight", "layers.4.bias"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, names)
        return ddp(net)

    plain, ours = make(), make()
    compression = gradwire.compress(ours, name, timeout_s=TIMEOUT_S)
    for model in (plain, ours):
        train(model, sgd(model), range(steps), rank)
    same, rounds = [distance(gradients(plain), gradients(ours)), parameters(plain) == parameters(ours)], []
    for step in (0, 1):
        rounds.append(compression.rounds)
        ours.zero_grad()
        try:
            (loss_of(ours, step, rank) * (float("nan") if rank == 1 and not step else 1.0)).backward()
            rounds.append("taken")
        except gradwire.NonFiniteError:
            rounds.append("not finite")
    return {"same": same, "rounds": rounds, "hooks": hooks(ours)}


def always_dense(rank, steps=4):
    """``quality`` 0, from the first step on and after the checkpoint of a training that had no plan yet."""
    settings = gradwire.Auto(quality=0.0, patience_s=0.0)
    flown = set()
    model, compression = compressed(settings)
    train(model, sgd(model), range(2), rank)
    state = compression.state_dict()
    again, resumed = compressed(settings)
    resumed.load_state_dict(state)
    for step in range(steps):
        flown |= set(resumed._reducer.methods.values())
        train(again, sgd(again), [step], rank)
    return {"flown": sorted(flown), "settled": state["autopilot"]["settled"], "hooks": hooks(again)}


def two_groups(rank, ranks):
    """Four ranks in two groups, each with a model and a codec of its own; and one model of all four beside."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    model, compression = compressed(["ef(topk:0.05)", "int8"][mine], process_group=groups[mine])
    everyone, _ = compressed("powersgd:2,start=1")
    for step in range(5):
        for each in (model, everyone):
            each.zero_grad()
            loss_of(each, step, rank).backward()
            sgd(each).step()
    alone = Net()
    return {
        "group": parameters(model),
        "all": parameters(everyone),
        "method": compression.method,
        "initial": parameters(alone),
    }


def two_models(rank, ranks):
    """Two compressed models in one loss."""
    first, _ = compressed("int8")
    second, _ = compressed("ef(topk:0.05)")
    for step in range(3):
        for model in (first, second):
            model.zero_grad()
        (loss_of(first, step, rank) + loss_of(second, step, rank)).backward()
        for model in (first, second):
            sgd(model).step()
    return {"first": parameters(first), "second": parameters(second)}


CASES = {
    "codec": codec, "hierarchical": hierarchical, "same_as_plain": same_as_plain, "accumulation": accumulation,
    "unused": unused,
    "options": options, "autocast": autocast, "half": half, "compiled": compiled, "nonfinite": nonfinite,
    "propagated": propagated, "only_small": only_small, "disagreement": disagreement, "refusals": refusals,
    "closed": closed, "traffic_is_the_last_steps": traffic_is_the_last_steps, "checkpoint": checkpoint,
    "planned": planned, "taken_over": taken_over, "ignored": ignored, "always_dense": always_dense,
    "unusual": unusual, "refused_models": refused_models, "failing": failing,
    "adapters": adapters, "mixed": mixed,
}  # fmt: skip
OF_RANKS = {
    "rebuild": rebuild, "scaler": scaler, "uneven": uneven, "two_groups": two_groups, "two_models": two_models,
    "unused_loses_nothing": unused_loses_nothing, "uneven_beside_plain": uneven_beside_plain,
}  # fmt: skip


if __name__ == "__main__":
    main_of_cases(CASES | OF_RANKS)
