"""Random cases for every op, on one backend against the reference: bytes must be equal.

As a program it goes on for some minutes, as `make sanitize` does under AddressSanitizer and UBSan:

    python -m tests.kernels.fuzz --minutes 10
"""

import argparse
import random
import sys
import time

import torch

from gradwire import Key, WireError, kernels
from gradwire.codecs import sparse
from gradwire.kernels import ops, reference
from gradwire.kernels.formats import Float8, Half, Integer, Levels, Natural, Sign, Ternary

BLOCKS = (16, 32, 64, 128, 256, 1024, 4096, 65536)
SCALES = (torch.float32, torch.bfloat16)


def values(rng, count):
    """Floats of some temper; now and then NaN, Inf, denormals, signed zeros, ties."""
    g = torch.Generator().manual_seed(rng.getrandbits(40))
    x = torch.randn(count, generator=g)
    temper = rng.randrange(8)
    if temper == 0:
        x = torch.randint(0, 1 << 32, (count,), generator=g).to(torch.int32).view(torch.float32)  # any bits
        x = torch.nan_to_num(x, nan=0.0, posinf=1.0, neginf=-1.0)
    elif temper == 1:
        x = (x * 2).round()
    elif temper == 2:
        x = x * 10.0 ** rng.randint(-44, 38)
        x = x.clamp(-3.4e38, 3.4e38)
    elif temper == 3:
        x = x.where(torch.rand(count, generator=g) < 0.1, torch.zeros(()))
    elif temper == 4:
        x = x.sign() * 0.0
    if count and rng.random() < 0.1:
        for _ in range(rng.randint(1, 3)):
            x[rng.randrange(count)] = rng.choice([float("nan"), float("inf"), float("-inf")])
    return x


def a_format(rng):
    block = rng.choice(BLOCKS)
    kind = rng.randrange(7)
    if kind == 0:
        bits = rng.choice((2, 3, 4, 8))
        return Integer(block, bits, rng.choice(SCALES), rng.choice(("absmax", "stochastic", *["mse"] * (bits < 4))))
    if kind == 1:
        return Float8(block, rng.choice(("e4m3", "e5m2")), rng.choice(SCALES))
    if kind == 2:
        return Sign(block, rng.choice(SCALES))
    if kind == 3:
        return Levels(block, rng.choice((1, 2, 4, 16, 127, 128, 1000, 32767)), rng.choice((1.0, 0.3)))
    if kind == 4:
        return Ternary(block, rng.choice((1.0, 0.3)))
    if kind == 5:
        return Natural(block)
    return Half(65536, rng.choice(("fp16", "bf16", "truncate16")))


def a_count(rng):
    if rng.random() < 0.01:  # several threads; and now and then, results written past the caches
        return rng.choice((rng.randint(500_000, 900_000), (1 << 22) + rng.randint(0, 99)))
    return rng.choice((0, 1, rng.randint(0, 70), rng.randint(0, 300), rng.randint(0, 5000), rng.randint(0, 300_000)))


def a_key(rng):
    return Key(rng.getrandbits(64), rng.getrandbits(56), rng.getrandbits(32))


def finite(x):
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def same(a, b, what):
    if isinstance(a, list | tuple):
        assert len(a) == len(b), what
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{what}[{i}]")
    elif isinstance(a, torch.Tensor):
        b = b.cpu()
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{what}: {a.dtype} {a.shape}, {b.dtype} {b.shape}"
        if not torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)):
            wrong = (a.contiguous().view(-1) != b.contiguous().view(-1)).nonzero()[:5, 0].tolist()
            raise AssertionError(f"{what}: differs at {wrong}: {a.view(-1)[wrong]}, {b.view(-1)[wrong]}")
    else:
        assert a == b, f"{what}: {a}, {b}"


def on(device, *tensors):
    return [None if t is None else t.to(device) for t in tensors]


def check_blocks(rng, backend, device):
    form, key, count = a_format(rng), a_key(rng), a_count(rng)
    if isinstance(form, Levels) and form.levels > 1000:
        count = min(count, 20_000)
    x = values(rng, count)
    residual = values(rng, count) if rng.random() < 0.6 else None
    decay = rng.choice((1.0, 0.9))
    about = f"{form} of {count}, decay {decay}"
    wanted = reference.encode_blocks(x, form, key, residual, decay)
    with kernels.use(backend):
        x_there, residual_there = on(device, x, residual)
        codes, scales, nonfinite, rest = ops.encode_blocks(x_there, form, key, residual_there, decay)
    same(wanted[:3], (codes, scales, nonfinite), about)
    if residual is not None and not int(wanted[2]):
        same(wanted[3], rest, f"{about}: rest")
    payloads = [(wanted[0], wanted[1])] * rng.choice((1, 1, 3, 9))
    out = finite(values(rng, count))
    add = rng.random() < 0.5
    expected, got = out.clone(), out.clone().to(device)
    reference.decode_blocks(expected, payloads, form, add)
    with kernels.use(backend):
        ops.decode_blocks(got, [tuple(on(device, *pair)) for pair in payloads], form, add)
    same(expected, got, f"{about}: decode of {len(payloads)}, add {add}")


def check_sums(rng, backend, device):
    count = a_count(rng)
    x, residual, decay = values(rng, count), values(rng, count) if rng.random() < 0.7 else None, rng.choice((1.0, 0.5))
    with kernels.use(backend):
        x_there, residual_there = on(device, x, residual)
        got = ops.accumulate(x_there, residual_there, decay)
        bad = ops.count_nonfinite(x_there)
    same(reference.accumulate(x, residual, decay), got, f"accumulate {count}")
    same(reference.count_nonfinite(x), bad, f"count_nonfinite {count}")
    by, divided, there = rng.choice((1, 2, 3, 7, 64, 1000)), x.clone(), x_there.clone()
    with kernels.use(backend):
        bad = ops.divide(there, by)
    same(reference.divide(divided, by), bad, f"divide {count} by {by}")
    same(divided.nan_to_num(), there.nan_to_num(), f"{count} divided by {by}")  # NaNs have many bits
    if residual is not None:
        for n in (0, 3):
            with kernels.use(backend):
                kept = ops.keep_residual(x_there.clone(), residual_there, torch.tensor(n, device=device))
            same(residual if n else x, kept, "keep_residual")


def check_bits(rng, backend, device):
    bits, count = rng.randint(0, 25), rng.choice((0, 1, 7, 8, 9, rng.randint(0, 3000)))
    codes = torch.randint(0, 1 << bits, (count,), generator=torch.Generator().manual_seed(rng.getrandbits(30)))
    packed = reference.pack_bits(codes, bits)
    with kernels.use(backend):
        same(packed, ops.pack_bits(codes.to(device), bits), f"pack {count} of {bits}")
        same(codes, ops.unpack_bits(packed.to(device), bits, count), f"unpack {count} of {bits}")


def check_random(rng, backend, device):
    key, stream, count = a_key(rng), rng.randrange(4), rng.randint(0, 3000)
    total = rng.randint(count, 10**7) if count else 5
    with kernels.use(backend):
        bits = ops.random_bits(key, stream, count, device=torch.device(device))
        chosen = ops.select_random(total, count, key, device=torch.device(device))
    same(reference.random_bits(key, stream, count, device=torch.device("cpu")), bits, "random_bits")
    same(reference.select_random(total, count, key, device=torch.device("cpu")), chosen, "select_random")


def check_selection(rng, backend, device):
    count = a_count(rng)
    x = finite(values(rng, count))
    wanted = min(count, rng.choice((0, 1, count, count // 2, max(1, count // 100), rng.randint(0, count))))
    each, block = rng.randint(1, 20), rng.choice(BLOCKS)
    tau = rng.choice((0.0, 1.0, 2.5, 1e-30, float(x.abs().max()) if count else 1.0))
    with kernels.use(backend):
        (there,) = on(device, x)
        top, blocks, above = ops.select_top(there, wanted), ops.select_block_top(there, each, block), None
        above = ops.select_threshold(there, tau)
    indices = reference.select_top(x, wanted)
    same(indices, top, f"select_top {wanted} of {count}")
    same(reference.select_block_top(x, min(each, block), block), blocks, f"select_block_top {each} of {block}, {count}")
    same(reference.select_threshold(x, tau), above, f"select_threshold {tau} of {count}")
    check_indices(rng, backend, device, indices, count)
    out, new = values(rng, count), values(rng, wanted)
    for add in (False, True):
        expected, got = finite(out), finite(out).to(device)
        reference.scatter(expected, indices, finite(new), add)
        with kernels.use(backend):
            ops.scatter(got, indices.to(device), finite(new).to(device), add)
            same(reference.gather(x, indices), ops.gather(there, indices.to(device)), "gather")
        same(expected, got, f"scatter add={add}")


def check_indices(rng, backend, device, indices, total):
    count = indices.numel()
    if count in (0, total):
        return
    width = rng.choice((sparse.index_width(total, count), rng.randint(0, 12)))
    packed = reference.pack_indices(indices, total, width)
    corrupt = packed.clone()
    for _ in range(rng.randint(1, 3)):
        corrupt[rng.randrange(corrupt.numel())] ^= 1 << rng.randrange(8)
    with kernels.use(backend):
        same(packed, ops.pack_indices(indices.to(device), total, width), f"pack_indices {count} of {total}, {width}")
        same(indices, ops.unpack_indices(packed.to(device), total, count, width), f"unpack_indices {width}")
        same(*(outcome(f, corrupt.to(d), total, count, width) for f, d in (
            (reference.unpack_indices, "cpu"), (ops.unpack_indices, device))), "corrupt indices")  # fmt: skip


def outcome(function, *args):
    try:
        return function(*args).cpu()
    except WireError as error:
        return str(error)


def check_rotation(rng, backend, device):
    key, block, count = a_key(rng), rng.choice((16, 64, 256, 1024, 4096, 65536)), a_count(rng)
    x = finite(values(rng, count))
    y = reference.rotate(x, key, block)
    with kernels.use(backend):
        same(y, ops.rotate(x.to(device), key, block), f"rotate {count} by {block}")
        expected = reference.unrotate(y, key, block, count)
        same(expected, ops.unrotate(y.to(device), key, block, count), f"unrotate {count} by {block}")


def check_products(rng, backend, device):
    sizes = [(rng.randint(1, 90), rng.randint(1, 90), rng.randint(1, 64)) for _ in range(rng.randint(1, 3))]
    sizes = [*sizes, (rng.randint(1, 2000), rng.randint(1, 700), rng.randint(1, 9))]
    g = torch.Generator().manual_seed(rng.getrandbits(30))
    ms = [torch.randn(n, m, generator=g) for n, m, _ in sizes]
    ps = [torch.randn(n, r, generator=g) for n, _, r in sizes]
    qs = [torch.randn(m, r, generator=g) for _, m, r in sizes]
    with kernels.use(backend):
        there = on(device, *ms), on(device, *ps), on(device, *qs)
        results = ops.thin_products(there[0], there[2]), ops.thin_transposed_products(there[0], there[1])
        rest = ops.outer_residual(*there)
        taken, means = [m.clone() for m in there[0]], [torch.empty_like(m) for m in there[0]]
        ops.outer_mean(taken, there[1], there[2], means)
    for i, (m, p, q) in enumerate(zip(ms, ps, qs, strict=True)):
        for got, a, b in ((results[0][i], m, q), (results[1][i], m.T, p)):
            within(got, a.double() @ b.double(), a.abs().double() @ b.abs().double(), a.shape[1])
        magnitude = m.abs().double() + p.abs().double() @ q.abs().double().T
        within(rest[i], m.double() - p.double() @ q.double().T, magnitude, p.shape[1] + 1)
        within(means[i], p.double() @ q.double().T, p.abs().double() @ q.abs().double().T, p.shape[1])
        assert torch.equal(taken[i].cpu(), m - means[i].cpu())


def within(got, exact, magnitude, terms):
    """The tolerance stated in ``ops``."""
    assert got.shape == exact.shape
    worst = ((got.cpu().double() - exact).abs() - terms * 2.0**-23 * magnitude).max()
    assert worst <= 0, f"{worst} beyond the tolerance"


CHECKS = (check_sums, check_bits, check_random, check_selection, check_rotation, check_products, *[check_blocks] * 6)


def one(seed, backend, device="cpu"):
    """One random case; the seed says which."""
    rng = random.Random(seed)
    torch.set_num_threads(rng.choice((1, 2, 3)))
    try:
        rng.choice(CHECKS)(rng, backend, device)
    except Exception as error:
        raise AssertionError(f"case {seed}: {error}") from error
    finally:
        torch.set_num_threads(1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    sets = [""]
    if options.backend == "native":
        from gradwire import _native

        sets = _native.instruction_sets()
    start, seed = time.monotonic(), options.first
    while time.monotonic() - start < 60 * options.minutes:
        if options.backend == "native":
            _native.use_instruction_set(sets[seed % len(sets)])
        one(seed, options.backend, options.device)
        seed += 1
        if seed % 2000 == 0:
            print(f"{seed} cases", file=sys.stderr, flush=True)
    print(f"{seed - options.first} cases on {options.backend} {' '.join(sets)}: all equal")


if __name__ == "__main__":
    main()
