"""The CUDA kernels against the reference on the CPU, byte for byte; low rank against float64, to its tolerance.

Without a GPU, ``TRITON_INTERPRET=1`` runs them on the CPU, slowly.
"""

import importlib
import os

import numpy as np
import pytest
import torch

import gradwire
from gradwire import Key, WireError
from gradwire.codecs import sparse
from gradwire.codecs.blocks import Blocks
from gradwire.kernels import ops, reference
from gradwire.kernels.formats import Float8, Half, Integer, Levels, Natural, Sign, Ternary
from tests.conformance.cases import CONTENTS, NON_FINITE, same_bits
from tests.kernels.fuzz import within

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")
triton = importlib.import_module("gradwire.kernels.triton")
selection = importlib.import_module("gradwire.kernels.triton.selection")
lowrank = importlib.import_module("gradwire.kernels.triton.lowrank")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
KEY = Key(seed=0xDEADBEEFCAFEBABE, step=(5 << 32) | 0xF0000001, bucket=0x80000003)  # all words have a high bit
SIZES = (0, 1, 37, 127, 128, 129, 257, 3000)
LARGE = () if INTERPRETED else (4097, 1 << 20, 3_000_001)
CODECS = (c for cls in gradwire.registered().values() for c in cls.examples() if isinstance(c, Blocks))
BF16, FP32 = torch.bfloat16, torch.float32
FORMATS = [
    *dict.fromkeys(c._format for c in CODECS),
    Integer(16, 8, BF16, "absmax"),
    Integer(512, 2, FP32, "mse"),
    Integer(16, 3, FP32, "stochastic"),
    Float8(16, "e5m2", BF16),
    Sign(16, BF16),
    Sign(512, FP32),
    Levels(64, 32767, 1.0),
    Natural(16),
    Ternary(16, 1.0),
]
if not INTERPRETED:
    FORMATS += [Integer(65536, 8, BF16, "absmax"), Sign(65536, BF16), Levels(65536, 16, 1.0), Natural(65536)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Make the interpreter quiet, run under numpy 2.4 and have less to do."""
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(selection, "_SHARES", 8)
    monkeypatch.setattr(selection, "_SHARE_TILE", 512)
    with np.errstate(all="ignore"):
        yield


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return type(value)(on_device(each) for each in value) if isinstance(value, list | tuple) else value


def assert_same(got, want):
    assert same_bits(got.cpu(), want), (got.cpu(), want)


def agree(op, *args, **kwargs):
    """Both backends give the same bytes."""
    if "device" in kwargs:
        got, want = getattr(triton, op)(*args, device=DEVICE), getattr(reference, op)(*args, device=CPU)
    else:
        got = getattr(triton, op)(*on_device(args), **kwargs)
        want = getattr(reference, op)(*args, **kwargs)
    assert_same(got, want)


def mixture(size):
    """Stretches of every content, of a length that no block divides."""
    names = list(CONTENTS)
    length = -(-size // len(names))
    return torch.cat([CONTENTS[name](length).to(FP32) for name in names])[:size]


def poisoned(size):
    x = mixture(size)
    for i, value in enumerate(NON_FINITE.values()):
        x[i * size // 3 : i * size // 3 + 1] = value
    return x


def test_it_has_every_op():
    """But for three of low rank, which are the reference's there: products of torch's own."""
    left = {"thin_products_of_sums", "outer_mean", "orthogonalize"}
    assert set(triton.__all__) | left == set(ops.__all__)
    assert not set(triton.__all__) & left


@pytest.mark.parametrize("size", [*SIZES, *LARGE])
@pytest.mark.parametrize("make", [mixture, poisoned])
def test_accumulate(make, size):
    x, residual = make(size), mixture(size).flip(0)
    for old, decay in ((None, 1.0), (residual, 1.0), (residual, 0.9)):
        got, want = triton.accumulate(*on_device((x, old)), decay), reference.accumulate(x, old, decay)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])
    agree("count_nonfinite", x)
    for by in (1, 2, 3, 64):
        there, here = on_device(x.clone()), x.clone()
        assert_same(triton.divide(there, by), reference.divide(here, by))
        assert_same(there.nan_to_num(), here.nan_to_num())  # NaNs have many bits


@pytest.mark.parametrize("size", [*SIZES, *LARGE])
@pytest.mark.parametrize("nonfinite", [0, 3])
def test_keep_residual(size, nonfinite):
    agree("keep_residual", mixture(size), mixture(size).flip(0), torch.tensor(nonfinite))


def assert_encodes_alike(x, form, residual, decay):
    got = triton.encode_blocks(on_device(x), form, KEY, on_device(residual), decay)
    want = reference.encode_blocks(x, form, KEY, residual, decay)
    for ours, theirs in zip(got, want, strict=True):
        if theirs is None:
            assert ours is None
        else:
            assert_same(ours, theirs)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_encode_blocks(form):
    for size in (*SIZES, *LARGE):
        x, residual = mixture(size), mixture(size).flip(0) * 0.3
        assert_encodes_alike(x, form, residual, 0.9)
        if size in (257, 3000, *LARGE[-1:]):
            assert_encodes_alike(x, form, None, 1.0)
            assert_encodes_alike(x, form, residual, 1.0)
            assert_encodes_alike(poisoned(size), form, residual, 1.0)


@pytest.mark.parametrize("content", CONTENTS)
def test_encode_blocks_of_one_content(content):
    x = CONTENTS[content](257).to(FP32)
    for form in FORMATS:
        assert_encodes_alike(x, form, x.flip(0), 1.0)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_decode_blocks(form):
    for size in (*SIZES, *LARGE):
        payloads = [reference.encode_blocks(mixture(size).roll(i), form, KEY)[:2] for i in range(9)]
        for count in (1, 2, 9) if size == 257 else (2,):
            for add in (False, True):
                got, want = on_device(mixture(size).flip(0)), mixture(size).flip(0)
                triton.decode_blocks(got, on_device(payloads[:count]), form, add)
                reference.decode_blocks(want, payloads[:count], form, add)
                assert_same(got, want)


@pytest.mark.parametrize("form", [Integer(32, 8, BF16, "absmax"), Integer(32, 3, BF16, "mse"), Half(65536, "bf16")])
def test_payloads_need_not_be_aligned(form):
    """Parts of a frame lie wherever the part before them ends."""
    codes, scales = reference.encode_blocks(mixture(3000), form, KEY)[:2]
    want = torch.empty(3000)
    reference.decode_blocks(want, [(codes, scales)], form, add=False)
    for shift in (1, 2, 4):
        moved = torch.empty(codes.numel() + shift, dtype=codes.dtype, device=DEVICE)[shift:].copy_(codes)
        got = torch.empty(3000, device=DEVICE)
        triton.decode_blocks(got, [(moved, scales.to(DEVICE))], form, add=False)
        assert_same(got, want)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 3000, *LARGE])
def test_random_bits(size):
    agree("random_bits", KEY, 255, size, device=DEVICE)


@pytest.mark.parametrize("bits", [0, 1, 2, 3, 5, 8, 9, 17, 24])
def test_bit_streams(bits):
    for size in (0, 1, 7, 37, 3000, *LARGE):
        codes = reference.random_bits(KEY, 0, size, device=CPU) & ((1 << bits) - 1)
        agree("pack_bits", codes, bits)
        agree("unpack_bits", reference.pack_bits(codes, bits), bits, size)


@pytest.mark.parametrize("content", CONTENTS)
def test_select_top(content):
    for size in (1, 37, 4097, *LARGE[1:]):
        x = CONTENTS[content](size).to(FP32)
        for count in sorted({0, 1, size // 100, size // 3, size - 1, size}):
            agree("select_top", x, count)


@pytest.mark.parametrize("content", [*CONTENTS, "one large stretch", "sorted"])
def test_select_top_by_a_sample(content, monkeypatch):
    if INTERPRETED:
        monkeypatch.setattr(selection, "_LEAST_TO_SAMPLE", 1000)
        monkeypatch.setattr(selection, "_SAMPLE", 1024)
        monkeypatch.setattr(selection, "_MAP_TILE", 1024)
    for size in (6001, *LARGE[1:]):
        if content == "one large stretch":  # which the sample may miss, and most tiles have nothing of
            x = CONTENTS["normal"](size)
            x[size // 2 : size // 2 + size // 50] *= 1000
        else:
            x = CONTENTS["normal"](size).sort().values if content == "sorted" else CONTENTS[content](size).to(FP32)
        for count in (1, size // 100, size // 9):
            agree("select_top", x, count)


@pytest.mark.parametrize("content", ["normal", "ties", "zeros", "all magnitudes"])
def test_selection(content):
    for size in (0, 1, 37, 4097, *LARGE):
        x = CONTENTS[content](size).to(FP32)
        for tau in (0.0, 0.5, 1e20):
            agree("select_threshold", x, tau)
        for each, block in ((1, 16), (16, 16), (3, 64), (41, 4096)) + (() if INTERPRETED else ((655, 65536),)):
            agree("select_block_top", x, each, block)


@pytest.mark.parametrize(("total", "count"), [(1, 1), (10, 3), (3000, 3000), (70_001, 700), (1 << 40, 1000), (5, 0)])
def test_random_selection(total, count):
    agree("select_random", total, count, KEY, device=DEVICE)


@pytest.mark.parametrize("size", [1, 37, 4097, *LARGE])
def test_gather_and_scatter(size):
    x = mixture(size)
    indices = reference.select_random(size, max(1, size // 3), KEY, device=CPU)
    agree("gather", x, indices)
    for add in (False, True):
        got, want, values = on_device(x.clone()), x.clone(), x.flip(0)[: indices.numel()]
        triton.scatter(got, *on_device((indices, values)), add)
        reference.scatter(want, indices, values, add)
        assert_same(got, want)


INDEX_CASES = [(10, 3), (3000, 37), (70_001, 700), (5000, 4999)] + ([] if INTERPRETED else [(1 << 24, 1 << 18)])


@pytest.mark.parametrize(("total", "count"), INDEX_CASES)
def test_packed_indices(total, count):
    indices = reference.select_random(total, count, KEY, device=CPU)
    best = sparse.index_width(total, count)
    for width in {0, 1, best, best + 1}:
        agree("pack_indices", indices, total, width)
        packed = reference.pack_indices(indices, total, width)
        for shift in (0, 1):
            moved = torch.empty(packed.numel() + shift, dtype=torch.uint8, device=DEVICE)[shift:].copy_(packed)
            assert_same(triton.unpack_indices(moved, total, count, width), indices)


@pytest.mark.parametrize("seed", range(12))
def test_corrupt_indices_are_refused_alike(seed):
    total, count = 3000, 137
    width = sparse.index_width(total, count)
    data = reference.pack_indices(reference.select_random(total, count, KEY, device=CPU), total, width)
    data[int(torch.randint(data.numel(), (), generator=torch.Generator().manual_seed(seed)))] ^= 1 << seed % 8
    assert outcome(triton, data.to(DEVICE), total, count, width) == outcome(reference, data, total, count, width)


def outcome(backend, *args):
    """Indices, or why there are none."""
    try:
        return backend.unpack_indices(*args).tolist()
    except WireError as error:
        return str(error)


@pytest.mark.parametrize(("size", "block"), [(0, 16), (37, 16), (257, 64), (4097, 256), (4097, 4096), (17_000, 16384)])
@pytest.mark.parametrize("content", ["mixture", "huge", "minus zeros"])
def test_rotation(content, size, block):
    x = mixture(size) if content == "mixture" else CONTENTS[content](size).to(FP32)
    agree("rotate", x, KEY, block)
    agree("unrotate", reference.rotate(x, KEY, block), KEY, block, size)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("block", [16, 4096, 65536])
def test_rotation_of_a_large_tensor(block):
    x = mixture(3_000_001)
    agree("rotate", x, KEY, block)
    agree("unrotate", reference.rotate(x, KEY, block), KEY, block, x.numel())


def factors(rows, columns, rank, device=DEVICE):
    """A matrix with thin ones for its rows and its columns."""
    g = torch.Generator(device=device).manual_seed(rows * 1000 + columns + rank)
    return [
        torch.randn(shape, generator=g, device=device) for shape in ((rows, columns), (rows, rank), (columns, rank))
    ]


def assert_low_rank(ms, ps, qs):
    """All three ops are within the tolerance; float64 sums are made where the tensors are."""
    results = triton.thin_products(ms, qs), triton.thin_transposed_products(ms, ps), triton.outer_residual(ms, ps, qs)
    for m, p, q, mq, mp, rest in zip(ms, ps, qs, *results, strict=True):
        m, p, q = m.double(), p.double(), q.double()
        close(mq, m @ q, m.abs() @ q.abs(), m.shape[1])
        close(mp, m.T @ p, m.T.abs() @ p.abs(), m.shape[0])
        close(rest, m - p @ q.T, m.abs() + p.abs() @ q.T.abs(), p.shape[1] + 1)


def close(got, exact, magnitude, terms):
    assert got.dtype == FP32
    assert got.device == exact.device
    within(got, exact.cpu(), magnitude.cpu(), terms)


RANKS = (1, 2, 3, 4, 7, 8, 16, 64)
MATRICES = [(1, 1), (1, 300), (300, 1), (37, 129), (300, 257), (64, 128)]
MATRICES += [] if INTERPRETED else [(1, 20_000), (20_000, 1), (257, 300)]


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("rank", RANKS)
def test_low_rank(rank, shape):
    assert_low_rank(*([each] for each in factors(*shape, rank)))


def test_low_rank_of_several_matrices():
    shapes = [(37, 129, 3), (1, 1, 1), (100, 257, 9), (5, 1000, 8), (128, 64, 11)]
    assert_low_rank(*zip(*(factors(*shape) for shape in shapes), strict=True))
    assert triton.thin_products([], []) == triton.thin_transposed_products([], []) == []
    assert triton.outer_residual([], [], []) == []


@pytest.mark.parametrize("rank", [1, 3] if INTERPRETED else [1, 4, 11])
def test_low_rank_of_views(rank):
    m, p, q = factors(100, 132, rank)
    wide = torch.cat([m, m], dim=1)
    shifted = torch.empty(m.numel() + 1, device=DEVICE)[1:].view(m.shape).copy_(m)  # rows not at 16 bytes
    turned = p.T.contiguous().T, q.T.contiguous().T
    spread = torch.stack([p, p], dim=2)[:, :, 0], torch.stack([q, q], dim=2)[:, :, 0]
    equal = p[:, :1].expand(-1, rank), q[:1].expand(132, rank)
    for matrix in (m, m.T.contiguous().T, wide[:, :132], wide[:, 1:133], wide[::3, :132], shifted):
        for left, right in ((p, q), turned, spread, equal):
            assert_low_rank([matrix], [left[: len(matrix)]], [right])


@pytest.mark.parametrize("shape", [(0, 5, 2), (5, 0, 2), (0, 0, 3), (5, 7, 0)], ids=str)
def test_low_rank_of_nothing(shape):
    args = [[each] for each in factors(*shape)]
    ms, ps, qs = args
    cases = ((triton.thin_products, reference.thin_products, (ms, qs)),
             (triton.thin_transposed_products, reference.thin_transposed_products, (ms, ps)),
             (triton.outer_residual, reference.outer_residual, args))  # fmt: skip
    for ours, theirs, arguments in cases:
        assert torch.equal(ours(*arguments)[0], theirs(*arguments)[0])


def test_low_rank_sums_are_split_and_reproducible(monkeypatch):
    """As in matrices of few rows or columns: more programs than there are tiles of results."""
    monkeypatch.setattr(lowrank, "_LEAST_STEPS", 1)
    for shape in ((3, 1000, 9), (1000, 3, 9), (300, 257, 2)):
        m, p, q = factors(*shape)
        assert_low_rank([m], [p], [q])
        for op, thin in ((triton.thin_products, q), (triton.thin_transposed_products, p)):
            assert_same(op([m], [thin])[0], op([m], [thin])[0].cpu())
        before = m.clone(), p.clone(), q.clone()
        triton.outer_residual([m], [p], [q])
        assert all(torch.equal(a, b) for a, b in zip(before, (m, p, q), strict=True))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("shape", [(4096, 4096), (4097, 4099), (3, 1 << 22), (1 << 22, 3), (1 << 17, 516)], ids=str)
def test_low_rank_of_a_large_matrix(shape, rank):
    assert_low_rank(*([each] for each in factors(*shape, rank)))


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("shape", [(70_000, 32_000), (32_000, 70_000), (24, 100_000_000)], ids=str)
def test_low_rank_beyond_32_bits(shape):
    """Indices do not wrap: small integers have exact sums."""
    rows, columns = shape
    if torch.cuda.get_device_properties(DEVICE).total_memory < 50 << 30:
        pytest.skip("needs 50 GB")
    m = torch.zeros(shape, device=DEVICE)
    m[-1, -1], m[rows // 2, 0], m[0, columns // 2] = 3.0, 5.0, 7.0
    p = (torch.arange(rows, device=DEVICE) % 7 + 1.0)[:, None].repeat(1, 2)
    q = (torch.arange(columns, device=DEVICE) % 5 + 1.0)[:, None].repeat(1, 2)
    want_rows, want_columns = torch.zeros_like(p), torch.zeros_like(q)
    for i, j in ((rows - 1, columns - 1), (rows // 2, 0), (0, columns // 2)):
        want_rows[i] += m[i, j] * q[j]
        want_columns[j] += m[i, j] * p[i]
    assert torch.equal(triton.thin_products([m], [q])[0], want_rows)
    assert torch.equal(triton.thin_transposed_products([m], [p])[0], want_columns)
    (rest,) = triton.outer_residual([m], [p], [q])
    for i in (0, rows // 2, rows - 1):
        assert torch.equal(rest[i], m[i] - 2 * p[i, 0] * q[:, 0])
    for j in (0, columns // 2, columns - 1):
        assert torch.equal(rest[:, j], m[:, j] - 2 * p[:, 0] * q[j, 0])


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_no_op_waits_for_the_device():
    x, residual = on_device((mixture(2_000_003), mixture(2_000_003).flip(0)))
    indices = triton.select_top(x, 20_000)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        e, nonfinite = triton.accumulate(x, residual, 0.9)
        triton.count_nonfinite(x)
        triton.keep_residual(e, residual, nonfinite)
        for form in FORMATS:
            codes, scales = triton.encode_blocks(x, form, KEY, residual, 0.9)[:2]
            triton.decode_blocks(e, [(codes, scales)] * 3, form, add=True)
        triton.random_bits(KEY, 0, 1000, device=DEVICE)
        triton.unpack_bits(triton.pack_bits(indices, 21), 21, 20_000)
        triton.select_top(x, 20_000)
        triton.select_top(x, 1_000_000)
        triton.select_block_top(x, 5, 256)
        triton.select_random(2_000_003, 1000, KEY, device=DEVICE)
        triton.scatter(e, indices, triton.gather(x, indices), add=True)
        triton.pack_indices(indices, x.numel(), 6)
        triton.unrotate(triton.rotate(x, KEY, 4096), KEY, 4096, x.numel())
        for rank in (4, 9):
            m, p, q = x[:2_000_000].view(1000, 2000), x[: 1000 * rank].view(1000, rank), x[: 2000 * rank].view(-1, rank)
            triton.outer_residual([m], triton.thin_products([m], [q]), triton.thin_transposed_products([m], [p]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
