"""Sparse payloads that lie about how much they hold."""

from dataclasses import replace

import pytest
import torch

import gradwire

X = torch.tensor([3.0, -2.0, 0.5, 0.0, 4.0, 0.1, -5.0, 0.2])


@pytest.mark.parametrize(("tau", "values"), [(1.0, 0), (1.0, 3), (1.0, 5), (0.0, 0), (0.0, 7)])
def test_a_payload_with_other_values_than_it_counts_is_refused(tau, values):
    codec = gradwire.codec(f"threshold:{tau}")
    payload, _ = codec.encode(X)
    count, _, indices = payload.parts
    assert int(count) == (8 if tau == 0 else 4)
    lying = replace(payload, parts=(count, torch.ones(values), indices))
    out = torch.ones(8)
    for decode in (codec.decode, lambda each: codec.decode_add(each, out)):
        with pytest.raises(gradwire.WireError, match=rf"declares \d values; the payload has {values}"):
            decode(lying)
    assert torch.equal(out, torch.ones(8))
