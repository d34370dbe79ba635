"""One interface for all ways in which ranks that hold copies of parameters keep them equal.

    GradientSync      no copies, or ranks that share one model by other means: nothing to do
    DDPSync           torch's DDP averages gradients during the backward (ddp)
    StageSync         gradients of a pipeline's stages are averaged after its backwards (ddp)
    FSDPSync          FSDP2 reduces gradients to shards during the backward (fsdp)
    GradientReducer   our own buckets: compressed, or carried by a list of messages (gradient_reducer)
    LocalSGD          replicas train alone and exchange weights every H steps (local_sgd)

The calls of one step, in their order:

    begin_step ─ microbatch (with: forward, backward) x m ─ finish_backward ─ finish_gradients ─ agree_on_norm
      ─ commit ─ end_step ─ measured_overlap
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.distributed as dist
from torch import Tensor

from shoal.comm.mesh import Mesh
from shoal.comm.replicas.overlap import Overlap
from shoal.parallel.data.bucket_averager import CommThreads
from shoal.parallel.data.parameter_use import ParameterUse

NOTHING: AbstractContextManager[None] = nullcontext()


class GradientSync:
    """The interface, and the way of a rank that has nothing to exchange."""

    keeps_nonfinite: bool = False
    """Whether updates are made whatever the gradient is: then ranks need not agree whether it is finite."""
    use: ParameterUse | None = None
    """Which parameters had gradients, where ranks have to use the same ones; None: they need not."""

    def begin_step(self, step: int) -> None:
        """Before the forwards of a step; steps count from 0."""

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """A context for forward and backward of one microbatch, the step's last or not."""
        return NOTHING

    def finish_backward(self) -> None:
        """Return when what was sent during the backwards has arrived."""

    def finish_gradients(self, step: int) -> None:
        """Exchange gradients that are whole on this replica only now."""

    def norm_group(self, mesh: Mesh) -> dist.ProcessGroup | None:
        """The ranks over whose pieces the global norm is taken; None: all."""
        return None

    def agree_on_norm(self, norm: Tensor, mesh: Mesh, *, step: int, scale: float, clip: float | None) -> Tensor:
        """The norm that decides on the update. `scale`: the factor of the gradients; `clip`: their largest norm."""
        return norm

    def commit(self, is_applied: Tensor | bool) -> None:
        """The update of the step was made, or dropped."""

    def end_step(self, steps_done: int) -> None:
        """After the update."""

    def measured_overlap(self, step: int) -> Overlap | None:
        """How long this step's exchange took, and how much of it was hidden; None: not measured."""
        return None

    def threads(self) -> CommThreads | None:
        """The threads of our own that exchange; None: there are none."""
        return None

    def shared_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that all ranks agree on."""
        return NOTHING

    def release(self) -> None:
        """Free what a forward without a backward has left gathered."""

    def close(self) -> None:
        """End the threads."""
