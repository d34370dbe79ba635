"""Random batches for a verification: of a small copy of a model, or of a model of transformers as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.context import num_chunks
from shoal.config.recipe import ModelSection, Recipe
from shoal.errors import ShoalError
from shoal.train.build_model import adapter_of, without_memory
from shoal.train.model_prefix import function_for

TOKENS = 24
"""Tokens of a sequence for a small copy of a model; divisible by 2, 3, 4, 6 and 8 ranks."""


def tokens_for(plan: Plan) -> int:
    """A short sequence length that the ranks of a plan can divide."""
    return math.lcm(TOKENS, plan.layout.tp * num_chunks(plan))


def random_batches(section: ModelSection, plan: Plan, recipe: Recipe, steps: int) -> list[dict[str, Tensor]]:
    """Random batches of few samples, but of enough microbatches for any schedule."""
    requested = plan.num_microbatches(recipe.data.global_batch)
    few = max(4, 2 * plan.layout.pp)
    num_microbatches = min(requested, few)
    size = plan.mb or min(plan.microbatch_size(recipe.data.global_batch), 2)
    batch = num_microbatches * size * plan.layout.data_degree
    num_tokens = tokens_for(plan)
    generator = torch.Generator().manual_seed(recipe.run.seed)
    return [draw(section, recipe, batch, num_tokens, generator) for _ in range(steps)]


def has_documents(recipe: Recipe) -> bool:
    """Whether several documents, or conversations, share a sample and do not see each other."""
    return recipe.data.mask_documents or recipe.data.pack


def draw(
    section: ModelSection, recipe: Recipe, num_samples: int, num_tokens: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Random inputs and labels. Of a language model: tokens with some ignored labels; no sample starts with the same
    token twice, since a router of experts cannot distinguish those two positions."""
    by_prefix, sizes = function_for("RANDOM_BATCHES", section.name), section.arguments
    if by_prefix is not None:
        size = {"num_samples": num_samples, "num_tokens": num_tokens}
        own: dict[str, Tensor] | None = by_prefix(section.name, sizes, **size, generator=generator)
        if own is not None:
            return own
    vocabulary = int(sizes["vocabulary"] if "vocabulary" in sizes else sizes["vocab_size"])
    tokens = torch.randint(vocabulary, (num_samples, num_tokens + 1), generator=generator)
    tokens[:, 1] = (tokens[:, 0] + 1 + tokens[:, 1] % (vocabulary - 1)) % vocabulary
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.25] = -100
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": labels}
    if has_documents(recipe):
        begins = torch.rand(labels.shape, generator=generator) < 0.2
        batch["documents"] = begins.cumsum(1).int()
    return batch


def random_batch_of(build: Callable[[], nn.Module], plan: Plan, num_ranks: int, seed: int) -> dict[str, Any]:
    """A random batch of a model of transformers, with the names of its forward: two microbatches of each data rank, or
    two for each stage. Raises for another model, whose inputs are not known."""
    model = without_memory(build)
    adapter = None if model is None else adapter_of(model)
    if adapter is None:
        raise ShoalError(
            "batch must be given, since inputs can be drawn for models of transformers alone, got None",
            fix="verify(model, (inputs, labels), plan)",
            code="V050",
        )
    filled = plan.fill(num_ranks).with_layout()
    size = (filled.mb or 2) * 2 * filled.layout.pp * filled.layout.data_degree
    generator = torch.Generator().manual_seed(seed)
    tokens, most = tokens_for(filled), adapter.describe(model).max_tokens
    if most is not None and most < tokens:
        step = filled.layout.tp * num_chunks(filled)
        tokens = max(step, most // step * step)
    batch: dict[str, Any] = adapter.random_batch(model, num_samples=size, num_tokens=tokens, generator=generator)
    return batch
