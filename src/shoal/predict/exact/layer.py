"""Messages of one layer, from the dimensions of a transformer: the exact count, as fast as a search needs it.

`exact.traffic` counts the messages of a whole rank, which `verify` proves. All layers of a kind send the same, so the
seconds of a plan need one layer of each kind, one microbatch at a time. `tests/unit/test_one_prediction.py` adds the
layers up again, for every proven composition and every rank.
"""

from __future__ import annotations

from functools import lru_cache

from shoal.blueprint.model_shapes import ModelShapes, Sizes
from shoal.blueprint.plan import Plan
from shoal.predict.exact.shapes import shapes_of
from shoal.predict.exact.step import Message, Step
from shoal.predict.exact.traffic import inside_block
from shoal.predict.workload import Workload


def layer_messages(
    model: Workload, plan: Plan, *, samples: int, sequence: int, is_sparse: bool = False
) -> list[Message]:
    """What a rank of tp, cp and ep sends in one layer, for one microbatch of `samples` under a resolved plan without a
    pipeline. `is_sparse`: of a layer with experts."""
    block = model.dense_layers if is_sparse else 0
    shapes = _few_layers(model, sequence)
    batch = samples * plan.layout.data_degree
    return list(inside_block(Step(plan, shapes, batch, 0, Sizes.of(plan)), shapes.description.blocks[block]))


@lru_cache(maxsize=64)
def _few_layers(model: Workload, sequence: int) -> ModelShapes:
    """The shapes of a model with one layer of each kind; how many rows a router keeps is as if it kept all."""
    layers = min(model.layers, model.dense_layers + 1)
    return shapes_of(model.resized(layers=layers, routes_by_sequence=False), sequence)
