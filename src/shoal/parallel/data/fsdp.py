"""`zero` 1 to 3: optimizer state, gradients and parameters divided over the ranks of `dp_shard`.

torch has `fully_shard` (FSDP2): every rank keeps 1/N of each parameter, of its gradient and of its optimizer state; a
*unit* (a block) is gathered before it computes. The three stages of ZeRO are three ways to use it. Memory of a rank
(P: bytes of all parameters, N: degree, A: Adam's state) and traffic per microbatch, m microbatches a step:

zero   between forward and backward   gradients   optimizer   gathered             gradients reduced
1      gathered                       P           A/N         once a step          once a step
2      gathered                       P/N         A/N         once a step          every microbatch
3      sharded, P/N                   P/N         A/N         twice a microbatch   every microbatch

With `dp_replicate` as well (HSDP), shards of the gradients are summed over the replicas at the step's last microbatch.
In a pipeline several microbatches are in flight at once: parameters stay gathered for the step and gradients are
reduced at its end, as under zero=1, whatever the stage.

A parameter of shape (), such as CLIP's `logit_scale`, has no dim to cut. FSDP2 leaves it alone: every rank has all of
it, and the gradients of all of them are averaged in one message after the step's last backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.blueprint.plan import Plan
from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError
from shoal.numerics.local_tensor import is_dtensor, is_fsdp, to_local
from shoal.numerics.offload.page_locked import LARGE, PageLocked
from shoal.numerics.precision import Precision
from shoal.parallel.data.ddp import average_gradients
from shoal.parallel.data.fsdp_units import in_order
from shoal.parallel.data.gradient_sync import GradientSync
from shoal.parallel.data.parameter_use import ParameterUse
from shoal.parallel.data.shard_policy import ShardPolicy

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

NEARLY_ALL = 0.9
"""Of a unit's bytes. The rest, norms and biases, is small enough for a copy from memory that is not locked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How to shard a model: over which ranks, by which ZeRO stage, in which precision, and on which device."""

    mesh: DeviceMesh
    """One axis, or two: replicas outside, shards inside."""
    zero: int
    compute_dtype: torch.dtype | None = None
    """The dtype in which parameters are gathered and used. None: their own."""
    reduce_dtype: torch.dtype | None = None
    """The dtype in which gradients are reduced. None: their own."""
    offloads_parameters: bool = False
    keeps_gathered: bool = False
    """Whether parameters stay gathered for a full step, as a pipeline needs it."""

    @classmethod
    def of(
        cls, plan: Plan, mesh: Mesh, precision: Precision, axis: str, policy: ShardPolicy, *, uses_own_reducer: bool
    ) -> Sharding | None:
        """How a plan shards parameters along an axis; None: it does not, and none stay in host memory."""
        offloads = plan.offload == "parameters" and mesh.device.type != "cpu"
        if not plan.is_sharded and not (plan.zero and offloads):
            return None
        lower = precision.is_lower
        axes = ("dp_replicate", axis) if plan.layout.dp_replicate > 1 and not uses_own_reducer else (axis,)
        reduce_dtype = precision.wide_dtype if lower else None
        return cls(
            mesh=mesh.device_mesh(axes),
            zero=plan.zero or 0,
            compute_dtype=precision.compute_dtype if lower else None,
            reduce_dtype=torch.bfloat16 if policy.reduce_dtype == "bf16" else reduce_dtype,
            offloads_parameters=offloads,
            keeps_gathered=plan.layout.pp > 1,
        )

    def shard(self, module: nn.Module | list[nn.Module], *, is_last: bool = False) -> None:
        """Make one unit of a module, or of several that are used together. `is_last`: the forward ends and the backward
        begins with it, so it is not resharded in between."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # FSDP2 warns that a layer's output, a view, might be changed in place; `verify` shows that none is.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        own = _unsharded(module if isinstance(module, list) else [module])
        locks_in_place = self.offloads_parameters and _is_nearly_all_large(own, self.mesh.size(-1))
        fully_shard(
            module,
            mesh=self.mesh,
            ignored_params=set(_numbers(module if isinstance(module, list) else [module])),
            reshard_after_forward=self.zero == 3 and not is_last and not self.keeps_gathered,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=self.compute_dtype,
                reduce_dtype=self.reduce_dtype,
                cast_forward_inputs=False,  # autocast decides the dtype of activations, as on one device
            ),
            offload_policy=CPUOffloadPolicy(pin_memory=not locks_in_place)
            if self.offloads_parameters
            else OffloadPolicy(),
        )
        if locks_in_place:
            _lock_in_place(own)


@dataclass
class FSDPSync(GradientSync):
    """FSDP2 reduces gradients to shards, as the stage of ZeRO says."""

    models: Sequence[nn.Module]
    """The model; in a pipeline, those of this rank's stages."""
    zero: int
    group: dist.ProcessGroup | None = None
    """All ranks over which gradients are averaged; None: FSDP2 averages every one."""

    def __post_init__(self) -> None:
        self.use: ParameterUse | None = ParameterUse(self.models)
        self.numbers = list(_numbers(self.models))

    def begin_step(self, step: int) -> None:
        """Begin to note which parameters have gradients."""
        assert self.use is not None
        self.use.begin_step()

    def microbatch(self, is_last: bool) -> AbstractContextManager[None]:
        """The backward reduces gradients, and lets go of gathered parameters, as this stage of ZeRO says."""
        return self._microbatch(is_last)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        (root,) = self.models  # a pipeline has no microbatches of a script's own
        assert is_fsdp(root)
        _set(root, is_last=is_last, zero=self.zero)
        try:
            yield
        finally:
            _set(root, is_last=True, zero=self.zero)

    @torch.no_grad()
    def finish_gradients(self, step: int) -> None:
        """Average the gradients of parameters of shape (), which FSDP2 does not know, in one message."""
        trained = [parameter for parameter in self.numbers if parameter.requires_grad]
        if not trained or self.group is None:
            return
        assert self.use is not None
        self.use.fill(trained)
        average_gradients([parameter.grad for parameter in trained if parameter.grad is not None], self.group)

    def release(self) -> None:
        """Let go of everything that is gathered."""
        for model in self.models:
            for unit in model.modules():
                if is_fsdp(unit):
                    unit.reshard()


def _numbers(modules: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield the parameters that stay whole on every rank: those of shape (), which have no dim to cut."""
    found = {parameter: None for module in modules for parameter in module.parameters() if not parameter.dim()}
    yield from found


Place = tuple[nn.Module, str]
"""A module and the name of one of its own parameters."""


def _unsharded(modules: Sequence[nn.Module]) -> list[Place]:
    """The parameters that the next unit will have: those that no inner unit has taken."""
    owners = (owner for module in modules for owner in module.modules())
    return [
        (owner, name)
        for owner in dict.fromkeys(owners)
        for name, parameter in owner.named_parameters(recurse=False)
        if parameter.dim() and not is_dtensor(parameter)
    ]


def _is_nearly_all_large(own: Sequence[Place], num_shards: int) -> bool:
    """Whether nearly all bytes of a rank's shards are in tensors that can be locked where they are."""
    shards: list[float] = [getattr(owner, name).nbytes / num_shards for owner, name in own]
    return sum(size for size in shards if size >= LARGE) > NEARLY_ALL * sum(shards)


def _lock_in_place(own: Sequence[Place]) -> None:
    """Let the GPU read shards in host memory by itself, as long as their modules exist."""
    memory = PageLocked()
    for owner, name in own:
        memory.lock(to_local(getattr(owner, name)))
        setattr(owner, "_page_locked", memory)  # noqa: B010  (an attribute of ours on a module of torch)


def _set(module: FSDPModule, *, is_last: bool, zero: int) -> None:
    """Set flags only if they change: each call walks over all units."""
    wanted = (is_last or zero >= 2, is_last, is_last or zero == 3)
    if getattr(module, "_last_set", (True, True, True)) != wanted:
        module.set_requires_gradient_sync(wanted[0])
        module.set_requires_all_reduce(wanted[1])
        module.set_reshard_after_backward(wanted[2])
        setattr(module, "_last_set", wanted)  # noqa: B010  (an attribute of ours on a module of torch)


def prefetch(root: nn.Module, policy: ShardPolicy) -> None:
    """Let each unit gather some that come after it in the forward, and before it in the backward.

        forward_prefetch=2:    root ─▶ 0 1    0 ─▶ 1 2    1 ─▶ 2 3    2 ─▶ 3
        backward_prefetch=2:   root ─▶ 3 2    3 ─▶ 2 1    2 ─▶ 1 0    1 ─▶ 0

    The order is that of the modules, inner ones first. torch waits for a gather that came too early or too late.
    """
    if policy.forward_prefetch is None and policy.backward_prefetch is None:
        return
    *units, last = (module for module in in_order(root) if is_fsdp(module))
    for place, unit in ((-1, last), *enumerate(units)):
        if policy.forward_prefetch is not None:
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + policy.forward_prefetch])
        if policy.backward_prefetch is not None:
            before = units if unit is last else units[:place]
            unit.set_modules_to_backward_prefetch(before[: -policy.backward_prefetch - 1 : -1])


def explain_ungathered(error: RuntimeError) -> None:
    """Replace torch's message about a shard in an operation, which says nothing of the module that has it."""
    if "got mixed torch.Tensor and DTensor" in str(error):
        raise ShoalError(
            "under zero a parameter must be read by its own module or a block around it,"
            " got one that is read elsewhere",
            fix="the module itself called in place of its weight, describe() with blocks that hold both, or zero=0",
            code="M142",
        ) from error
