"""The worker in JavaScript, which knows gradwire from its docs alone: `make test-javascript`."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

import gradwire
from gradwire import CoordinatorClient, Credentials, ServeSettings
from gradwire.coordinator.access import Worker, new_token, token_hash
from tests import needs

EXAMPLE = Path(__file__).parents[2] / "examples" / "javascript"
ENCODE = """
import { decode, encode } from './frames.mjs';
const values = Float32Array.from(JSON.parse(process.argv[1]));
for (const codec of ['none', 'int8']) {
  const frame = encode[codec](values, [values.length]);
  console.log(frame.toString('hex'));
  console.log(Buffer.from(decode(frame).buffer).toString('hex'));
}
"""

pytestmark = pytest.mark.full
for each in ("node", "npm"):
    needs.program(each, "apt-get install nodejs npm")
if "GRADWIRE_TEST_JAVASCRIPT" not in os.environ:
    needs.skip("packages of npm", "make test-javascript")


def node(*arguments, **environment):
    run = subprocess.run(
        ["node", *arguments], cwd=EXAMPLE, env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 700])
def test_its_frames_are_those_of_gradwire_and_it_reads_them(n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-35, 3, n)
    x[n // 2 : n // 2 + 1] = 3.4028234e38  # its scale is cut, so that it stays finite
    x[512:] = torch.tensor([127, 0.5, 1.5, -0.5]).repeat(47) if n == 700 else x[512:]  # ties go to the even code
    told = node("--input-type=module", "--eval", ENCODE, json.dumps(x.tolist())).splitlines()
    for codec, frame, values in zip(("none", "int8"), told[::2], told[1::2], strict=True):
        assert bytes.fromhex(frame) == gradwire.encode(x, codec)
        assert bytes.fromhex(values) == gradwire.decode(bytes.fromhex(frame)).numpy().tobytes()


@pytest.mark.parametrize("guarded", [False, True])
def test_it_reads_computes_pushes_and_reads_what_has_changed(guarded):
    token = new_token() if guarded else None
    known = (Worker("javascript", token_hash(token), ("push", "read", "admin")),) if guarded else ()
    with gradwire.serve(ServeSettings(address="127.0.0.1:0", workers=known)) as server:
        told = node("client.mjs", server.address, **({"GRADWIRE_TOKEN": token} if guarded else {}))
        with CoordinatorClient(server.address, credentials=Credentials(token=token)) as client:
            version, parameters = client.read()
    losses = [float(each) for each in re.findall(r"loss (\S+) at", told)]
    assert len(losses) == version == 20
    assert losses[0] > 100
    assert losses[-1] < 1e-6
    assert re.findall(r"pushed as (\w+)", told) == ["none", "int8"] * 10
    printed = re.search(r"version 20, w = (.*) \.\.\.", told)[1]
    assert torch.equal(torch.tensor([float(each) for each in printed.split()]), parameters["w"][:5])
    assert torch.allclose(parameters["w"], torch.sin(torch.arange(1000) / 50), atol=1e-5)
