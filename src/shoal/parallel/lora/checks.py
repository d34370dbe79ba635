"""Plans that cannot train a model with LoRA."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.errors import Problem
from shoal.parallel.lora.layers import adapted_layers
from shoal.parallel.lora.quantize import quantized_layers


def check_adapters(
    model: nn.Module, plan: Plan, description: Description, *, compiles: bool = False
) -> Iterator[Problem]:
    """Problems of a plan with the layers of a model that have LoRA."""
    adapted = adapted_layers(model)
    if not adapted:
        return
    without = [block for block in description.blocks if not any(name.startswith(f"{block}.") for name in adapted)]
    if plan.layout.pp > 1 and without:
        yield Problem(
            "L005",
            f"pp={plan.layout.pp} needs LoRA in every block, since a stage without it has nothing to train, got none in"
            f" {without[0]}",
            'targets="all-linear" (--model.lora.targets all-linear), or pp=1',
        )
    if compiles and quantized_layers(model):
        yield Problem(
            "L033",
            "torch.compile does not see the products with frozen weights in 4 bits, got compile=True",
            "compile=False; or a model without shoal.quantize_base",
        )
    if plan.precision == "fp8":
        yield Problem(
            "L006",
            "fp8 computes whole products, and layers with LoRA compute in bf16, got precision fp8",
            "--plan.precision bf16",
        )
