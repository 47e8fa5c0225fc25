"""The example of docs/frameworks.md: a model built without the adaptor, in a loop that is not Megatron's."""

import re

import pytest

from tests.integration.launch import torchrun


@pytest.mark.slow
@pytest.mark.dist
def test_the_example_converts_and_trains() -> None:
    out = torchrun(2, "docs.examples.own_loop", []).stdout
    steps = re.findall(r"layers \[1, 2\], step (\d): loss ([0-9.]+)", out)
    assert [step for step, _ in steps] == list("01234")
    losses = [float(loss) for _, loss in steps]
    assert losses == sorted(losses, reverse=True)
