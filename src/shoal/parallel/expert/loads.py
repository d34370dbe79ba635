"""How busy the experts of a model were in a step, and what its routers make of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError
from shoal.parallel.expert.aux_loss import AuxLoss
from shoal.parallel.expert.router import Router, update_bias


def sum_loads(balance: AuxLoss, routed: Mapping[str, int], mesh: Mesh, *, copies: int) -> Tensor:
    """The loads of all routers of the model over the global batch, of which `copies` ranks each have the same.

    A row for each router, in the order of the model: how often each expert was chosen, how many choices were dropped,
    and the auxiliary loss, summed over sequences. `routed`: router → how many experts it chooses from.
    """
    totals = torch.zeros(len(routed), max(routed.values()) + 2, dtype=torch.float64, device=mesh.device)
    for row, (name, num_experts) in zip(totals, routed.items(), strict=True):
        if name in balance.loads:  # a router of this rank, and a microbatch that counted
            row[:num_experts] = balance.loads[name]
            row[-2] = balance.dropped[name]
            row[-1] = balance.auxiliary.get(name, 0.0)
    balance.clear()
    if mesh.layout.world_size > 1:
        dist.all_reduce(totals)
        totals /= copies
    return totals


def balance_routers(
    routers: Mapping[str, Router], routed: Mapping[str, int], totals: Tensor, *, is_applied: Tensor | bool
) -> None:
    """Let each router of this rank favour those experts that had too little."""
    for place, (name, num_experts) in enumerate(routed.items()):
        if name in routers:
            update_bias(routers[name], totals[place, :num_experts], is_applied)


def reject_unattached(routers: Mapping[str, Router]) -> None:
    """Raise if a forward has dropped what a router returns for its auxiliary loss."""
    if forgotten := [name for name, router in routers.items() if not router.has_attached]:
        raise ShoalError(
            f"router.attach_aux_loss() was not called after {forgotten[0]}: its auxiliary loss and expert loads are"
            " lost",
            fix="routing, *facts = router(x); y = experts(x.flatten(0, 1), routing).view_as(x);"
            " y = router.attach_aux_loss(y, *facts)",
            code="M038",
        )
