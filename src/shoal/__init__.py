"""Plan, verify and run distributed training of PyTorch models.

    shoal.Run       train with your own loop
    shoal.plan      rank the plans of a model on a cluster
    shoal.verify    compare a plan with one process
    shoal.profile   time the parts of a step, and say what bounds it

`import shoal` is fast: torch is imported when the first name that needs it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.version import __version__ as __version__

if TYPE_CHECKING:
    from shoal.blueprint.description import Description as Description
    from shoal.blueprint.description import Split as Split
    from shoal.blueprint.layout import Layout as Layout
    from shoal.blueprint.layout_drawing import draw_layout as draw_layout
    from shoal.blueprint.plan import Plan as Plan
    from shoal.checkpoint.formats.adapter import load_adapter as load_adapter
    from shoal.config.recipe import Recipe as Recipe
    from shoal.errors import ShoalError as ShoalError
    from shoal.numerics.ops.attention import AttentionRule as AttentionRule
    from shoal.numerics.optim.adamw import AdamW as AdamW
    from shoal.numerics.optim.layerwise import LAMB as LAMB
    from shoal.numerics.optim.layerwise import LARS as LARS
    from shoal.numerics.optim.lion import Lion as Lion
    from shoal.numerics.optim.muon import Muon as Muon
    from shoal.parallel.context.attention import Attention as Attention
    from shoal.parallel.context.attention import DocumentMask as DocumentMask
    from shoal.parallel.data.diloco import OuterOptimizer as OuterOptimizer
    from shoal.parallel.expert.experts import Experts as Experts
    from shoal.parallel.expert.router import Router as Router
    from shoal.parallel.lora.apply import lora as lora
    from shoal.parallel.lora.apply import merge_lora as merge_lora
    from shoal.parallel.lora.quantize import quantize_base as quantize_base
    from shoal.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from shoal.parallel.tensor import RowParallelLinear as RowParallelLinear
    from shoal.planner.answer import plan as plan
    from shoal.train.build_model import from_pretrained as from_pretrained
    from shoal.train.ema import EMA as EMA
    from shoal.train.optim.build import muon_groups as muon_groups
    from shoal.train.profile.profiler import profile as profile
    from shoal.train.run import Run as Run
    from shoal.train.trace.find_blocks import trace_blocks as trace_blocks
    from shoal.verification.api import verify as verify

_HOMES = {
    "AdamW": "shoal.numerics.optim.adamw",
    "Attention": "shoal.parallel.context.attention",
    "AttentionRule": "shoal.numerics.ops.attention",
    "ColumnParallelLinear": "shoal.parallel.tensor",
    "Description": "shoal.blueprint.description",
    "DocumentMask": "shoal.parallel.context.attention",
    "EMA": "shoal.train.ema",
    "Experts": "shoal.parallel.expert.experts",
    "LAMB": "shoal.numerics.optim.layerwise",
    "LARS": "shoal.numerics.optim.layerwise",
    "Layout": "shoal.blueprint.layout",
    "Lion": "shoal.numerics.optim.lion",
    "Muon": "shoal.numerics.optim.muon",
    "muon_groups": "shoal.train.optim.build",
    "plan": "shoal.planner.answer",
    "profile": "shoal.train.profile.profiler",
    "Plan": "shoal.blueprint.plan",
    "Recipe": "shoal.config.recipe",
    "OuterOptimizer": "shoal.parallel.data.diloco",
    "Router": "shoal.parallel.expert.router",
    "RowParallelLinear": "shoal.parallel.tensor",
    "Run": "shoal.train.run",
    "ShoalError": "shoal.errors",
    "Split": "shoal.blueprint.description",
    "from_pretrained": "shoal.train.build_model",
    "draw_layout": "shoal.blueprint.layout_drawing",
    "load_adapter": "shoal.checkpoint.formats.adapter",
    "lora": "shoal.parallel.lora.apply",
    "merge_lora": "shoal.parallel.lora.apply",
    "quantize_base": "shoal.parallel.lora.quantize",
    "trace_blocks": "shoal.train.trace.find_blocks",
    "verify": "shoal.verification.api",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
