"""torch's stages and schedules, adapted for a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from shoal.comm.profile.timer import part
from shoal.parallel.pipeline.split_backward import add_gradients_of_weights, edges_of

SCHEDULES: Mapping[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zb": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}


class TorchStage(PipelineStage):
    """torch's stage with two changes.

    torch 2.11 warms connections up by sending from every stage to the next one, also if both are on one rank (the
    bottom of a V), and gloo has no connection from a rank to itself. 2.13 no longer does. The second half of a split
    backward is ours, and needs the graph to stay alive."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        operations = super()._get_init_p2p_neighbors_ops()
        return [operation for operation in operations if operation.group_peer != self.group_rank]

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        """Run torch's backward, except for the second half of a split backward."""
        with part("backward"):
            return self._backward(backward_type, bwd_kwargs, *rest, **more)

    def _backward(self, backward_type: str, bwd_kwargs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        if backward_type == "weight":
            add_gradients_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
            return (), None
        edges = edges_of(bwd_kwargs["stage_output"]) if backward_type == "input" else []
        gradients, groups = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *rest, **more)
        for group in groups or ():
            group["edges"] = edges  # keeps the graph alive until the second half has consumed the group
        return gradients, groups
