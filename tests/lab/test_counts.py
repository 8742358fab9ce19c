"""What gradwire says it sends is what passes the interface."""

import pytest

from gradwire.clusters import run_workers


@pytest.mark.full
@pytest.mark.parametrize("method", ["int8", "topk:0.01+int8"])
def test_counted_bytes_are_those_of_the_interface(lab, method):
    asked = {"task": "digits", "batch_size": 4, "methods": [method], "rounds": 1, "steps": 3}
    asked["interface"] = lab.hosts[0].interface
    (event,) = run_workers("gradwire.benchmarks.training_worker", asked, 2, lab)
    assert event["counted_bytes"] == pytest.approx(event["wire_bytes"], rel=0.03)
    assert event["sent_bytes"] < event["counted_bytes"] < 1.1 * event["sent_bytes"]
