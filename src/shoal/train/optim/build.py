"""The optimizer of a prepared run, and the groups of Muon, which knows the blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.config.recipe import OptimSection
from shoal.errors import Problem, raise_if
from shoal.numerics.optim import groups
from shoal.numerics.optim.build import build_optimizer
from shoal.train.build_model import describe
from shoal.train.run_state import RunState


def optimizer_of_run(run: RunState, section: OptimSection, *, lr: float, seed: int = 0) -> Optimizer:
    """Build the optimizer of a recipe over the parameters of a run whose model is prepared."""
    parts = [part.model for part in run.composed.parts]
    names = groups.matrices_in_blocks(parts, run.description.blocks)
    matrices = [run.composed.named[name] for name in names if name in run.composed.named]
    return build_optimizer(run.parameters, section, lr=lr, seed=seed, offload=run.plan.offload, matrices=matrices)


def muon_groups(model: nn.Module, *, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Return groups for `shoal.Muon`, of a model that describes its blocks or of transformers.

    Muon updates the matrices of the blocks; AdamW updates embeddings, the head, norms, biases and tensors of other
    shapes. Weight decay is for tensors of two dimensions and more. Call it before `run.prepare`.

        optimizer = shoal.Muon(shoal.muon_groups(model), lr=1e-3)
    """
    description = describe(model)
    raise_if(check_matrices(model, description.blocks), title="shoal.muon_groups")
    names = set(groups.matrices_in_blocks([model], description.blocks))
    matrices = [parameter for name, parameter in model.named_parameters() if name in names]
    return groups.muon_groups(model.parameters(), matrices, weight_decay)


def check_matrices(model: nn.Module, blocks: tuple[str, ...]) -> Iterator[Problem]:
    """Find a model in whose blocks there is nothing for Muon to update."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if trained.isdisjoint(groups.matrices_in_blocks([model], blocks)):
        where = f"its {len(blocks)} blocks have none to train" if blocks else "it describes no blocks"
        yield Problem(
            "T071",
            f"Muon needs matrices in the blocks of {type(model).__name__}, and {where}",
            '--optim.name adamw; or a method describe() of the model; or shoal.Muon([{"params": matrices}, {"params":'
            ' others, "algorithm": "adamw"}])',
        )
