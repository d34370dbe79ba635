"""The multilayer perceptron against its formula, and its description."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.blueprint.description import Split
from shoal.errors import ShoalError
from shoal.models import BUILDERS
from shoal.models.mlp import build
from shoal.numerics.init import initialise
from tests.rejects import rejects


def test_forward_is_linear_activation_linear() -> None:
    model = build(sizes=[12, 7, 5, 3], activation="tanh").double()
    initialise(model, seed=0)
    images = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = images.reshape(4, 12)
    for i in range(3):
        linear = model.layers[i].linear
        x = x @ linear.weight.T + linear.bias
        x = x.tanh() if i < 2 else x
    torch.testing.assert_close(model(images=images), x, rtol=1e-13, atol=1e-13)


def test_description() -> None:
    description = build(sizes=(4, 8, 8, 2)).describe()
    assert description.blocks == ("layers.0", "layers.1", "layers.2")
    assert description.splits == {"layers.0.linear": Split.COLUMN, "layers.1.linear": Split.ROW}
    assert description.num_outputs == 2
    assert description.training_flops is not None
    assert description.training_flops((5, 4)) == 6 * 5 * (32 + 64 + 16)


def test_each_block_may_be_taken_out() -> None:
    model = build()
    initialise(model, seed=0)
    inputs = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    expected = model(inputs)
    x = inputs
    for kept in model.describe().blocks:
        part = build()
        part.load_state_dict(model.state_dict())
        for name in set(part.describe().blocks) - {kept}:
            part.set_submodule(name, nn.Identity())
        x = part(x)
    assert torch.equal(x, expected)


def test_mistakes_come_together() -> None:
    with pytest.raises(ShoalError) as caught:
        build(sizes=(4,), activation="rellu")
    assert len(caught.value.problems) == 2
    with rejects("M007", match="a list, each an integer"):
        build(sizes=3)


def test_every_builder_in_the_table_builds() -> None:
    for target in BUILDERS.values():
        module, _, function = target.partition(":")
        with torch.device("meta"):
            model = getattr(__import__(module, fromlist=[function]), function)(preset="tiny")
        assert isinstance(model, nn.Module)
