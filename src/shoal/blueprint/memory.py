"""Bytes of parameters, gradients and optimizer state that one rank holds at the fullest moment between microbatches.

That moment is after the backward of a microbatch that is not the step's last: gradients have begun to accumulate, and
what stays gathered for the next microbatch is gathered. Activations come on top, and so do, for moments, a unit that is
just being gathered or reduced.

The ZeRO paper counts P parameters on N ranks, weights and gradients of w bytes, K bytes of optimizer state each. What
FSDP2 holds beyond that is the shard, which it keeps beside a gathered copy:

| zero | paper               | here                                     |
|------|---------------------|------------------------------------------|
| 0    | wP + wP + KP        | the same (DDP's buckets, wP, come on top)|
| 1    | wP + wP + KP/N      | (wP + wP/N) + wP + KP/N                  |
| 2    | wP + wP/N + KP/N    | (wP + wP/N) + wP/N + KP/N                |
| 3    | wP/N + wP/N + KP/N  | the same                                 |

With the paper's w = 2, K = 12: 16P, 4P + 12P/N, 2P + 14P/N, 16P/N. shoal's weights are the optimizer's own (w = 4 and
K = 8 for Adam), with no second copy in low precision except while gathered: in a plan of lower precision, the gathered
copy is in that precision. In a pipeline parameters stay gathered and gradients whole until the last microbatch, as
under zero=1, whatever the stage.

Rows are divided as FSDP2 divides them: a shard has ceil(rows/N) rows on every rank, also where the last ranks have
nothing to put there; optimizer state has only the rows that are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from shoal.blueprint import anatomy as rules
from shoal.blueprint.anatomy import Anatomy, Part, Shape, Sizes
from shoal.blueprint.plan import Plan


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one rank, by cause."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def memory(plan: Plan, anatomy: Anatomy, *, rank: int, sizes: Sizes | None = None, optimizer_states: int = 2) -> Memory:
    """What a rank will hold under a resolved plan. `optimizer_states`: tensors as large as a parameter that the
    optimizer keeps for it: 2 for Adam, 1 for momentum, 0 for plain SGD. Its numbers per parameter are left out."""
    sizes = sizes or Sizes.of(plan)
    degree, index = plan.layout.dp_shard if plan.zero else 1, plan.layout.coordinate(rank)["dp_shard"]
    parts = rules.parts(plan, anatomy, rank)
    pieces = [shape for part in parts for shape in part.pieces.values()]
    trained = [shape for part in parts for shape in anatomy.trained(part.pieces).values()]
    stays_gathered = degree > 1 and (plan.zero != 3 or plan.layout.pp > 1)
    has_whole_gradients = degree > 1 and (plan.zero == 1 or plan.layout.pp > 1)
    if has_whole_gradients:  # they add up in the precision in which they will be reduced
        gradients = sum(map(prod, trained)) * sizes.reduce
    else:
        gradients = _shards(trained, degree) * sizes.weight
    return Memory(
        parameters=_shards(pieces, degree) * sizes.weight + stays_gathered * _gathered(parts, degree) * sizes.compute,
        gradients=gradients,
        optimizer=optimizer_states * sizes.weight * sum(rules.shard(s, index=index, degree=degree) for s in trained),
    )


def _shards(shapes: Iterable[Shape], degree: int) -> int:
    return sum(rules.padded_shard(shape, degree=degree) for shape in shapes)


def _gathered(parts: Iterable[Part], degree: int) -> int:
    """Elements of the gathered copies; of many stages torch keeps only some at a time."""
    each = [_shards(part.pieces.values(), degree) * degree for part in parts]
    return sum(sorted(each)[-rules.GATHERED_STAGES :])
