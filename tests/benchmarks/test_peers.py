"""The contest is fair: peers do the same work to the same quality."""

import pytest
import torch

from gradwire.benchmarks.codecs import _DECODE, _DECODE_8, _ENCODE, _FEEDBACK, minimal_bytes
from gradwire.benchmarks.libraries import installed, libraries
from gradwire.benchmarks.peers import Rotation, in_torch, select_top
from gradwire.codecs import codec
from gradwire.kernels import ops
from gradwire.transforms.base import SenderTransform
from gradwire.wire import TensorSpec
from tests import needs

N = 1 << 18
CODECS = sorted({*_ENCODE, *_DECODE, *_DECODE_8, "bf16"})
LIBRARIES = sorted(installed())


@pytest.fixture(scope="module")
def x():
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def peers_of(name):
    """As it is timed in eager mode, as it is compiled, and what is installed."""
    which = codec(name)
    found = {"eager": in_torch(which), "tuned": in_torch(which, torch.empty(2, N))}
    found |= {"compiled": in_torch(which, fused=True)}
    return found | libraries(which, torch.device("cpu"))


def error(x, decoded):
    return float((x - decoded).norm() / x.norm())


@pytest.mark.parametrize("name", CODECS)
def test_a_peer_in_torch_has_our_error(name, x):
    c = codec(name)
    ours = error(x, c.decode(c.encode(x)[0]))
    for peer in (in_torch(c, torch.empty(2, N)), in_torch(c), in_torch(c, fused=True)):
        theirs = error(x, peer.decode(peer.encode(x), torch.empty(N)))
        assert theirs == pytest.approx(ours, rel=0.01)


@pytest.mark.parametrize("name", [name for name in CODECS if name in ("int8", "int4", "fp8:e4m3")])
def test_a_library_is_not_better_only_because_it_does_less(name, x):
    """3%: torchao computes with bfloat16 scales. NF4 is a better code than evenly spaced integers, and larger."""
    if not LIBRARIES:
        needs.skip("torchao or bitsandbytes", "pip install torchao bitsandbytes")
    c = codec(name)
    ours = error(x, c.decode(c.encode(x)[0]))
    for label, peer in libraries(c, x.device).items():
        theirs = error(x, peer.decode(peer.encode(x), torch.empty(N)))
        assert theirs == pytest.approx(ours, rel=0.2 if (label, name) == ("bitsandbytes", "int4") else 0.03)


@pytest.mark.parametrize("name", CODECS)
def test_what_a_peer_sends_is_at_least_as_long_as_ours(name, x):
    for label, peer in peers_of(name).items():
        sent = sum(part.nbytes for part in peer.encode(x))
        ours = codec(name).layout(TensorSpec.of(x)).body_nbytes
        assert sent >= ours, label
        assert sent <= 1.1 * ours or name.startswith(("topk", "randomk")), label  # sparse: plain 32-bit indices


@pytest.mark.parametrize("name", CODECS)
def test_a_peer_loses_nothing_of_its_residual_and_adds_what_it_decodes(name, x):
    for label, peer in peers_of(name).items():
        out = torch.empty(N)
        if peer.feedback:
            residual = 0.1 * x.flip(0)
            expected = x + residual
            parts = tuple(part.clone() for part in peer.encode_feedback(x, residual))
            assert torch.allclose(peer.decode(parts, out) + residual, expected, atol=1e-5), label
        parts = tuple(part.clone() for part in peer.encode(x))
        decoded, acc = peer.decode(parts, out).clone(), torch.ones(N)
        peer.decode_add([parts, parts], acc)
        assert torch.allclose(acc, 1 + 2 * decoded, atol=1e-5), label


def test_every_codec_that_is_timed_has_a_peer():
    for name in (*_FEEDBACK, *CODECS):
        c = codec(name)
        assert in_torch(c.inner if isinstance(c, SenderTransform) else c) is not None


def test_selection_and_rotation_do_what_ours_do(x):
    assert select_top(x, 1000).sort().values.equal(ops.select_top(x, 1000))
    block = 1024
    spikes = torch.zeros(N)
    spikes[::block] = 1.0
    for rotation in (Rotation(x.device, torch.empty(2, N)), Rotation(x.device)):
        assert torch.allclose(rotation(spikes).abs(), torch.full((N,), 1 / 32))
        assert torch.allclose(rotation(x).view(-1, block).norm(dim=1), x.view(-1, block).norm(dim=1), rtol=1e-4)


def test_minimal_bytes_count_each_tensor_once():
    spec = TensorSpec((1_024_000,))
    tensor, int8, topk = 4_096_000, 1_024_000 + 8_000, codec("topk:0.01").layout(spec).body_nbytes
    assert minimal_bytes("decode", codec("int8"), spec) == tensor + int8
    assert minimal_bytes("decode_add", codec("int8"), spec) == 2 * tensor + int8
    assert minimal_bytes("decode_add_8", codec("int8"), spec) == 2 * tensor + 8 * int8
    assert minimal_bytes("decode_add", codec("topk:0.01"), spec) == 2 * 4 * 10_240 + topk
