"""Numbers and places of an engine of DeepSpeed, for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.config.deepspeed.translation import Translation
from shoal.deepspeed.accumulation import Accumulation
from shoal.errors import ShoalError
from shoal.train.run import Run


class EngineState:
    """The state of an engine, as its methods and properties give it."""

    run: Run
    translation: Translation
    config: Mapping[str, Any]
    """The config, as DeepSpeed spells it."""
    optimizer: Optimizer | None
    accumulation: Accumulation

    # ---- sizes -------------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.run.degree

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a microbatch of one rank."""
        return int(self.translation.plan["mb"])

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step, on one rank."""
        return self.accumulation.number

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of microbatches of a step, from the next step on."""
        share = self.train_micro_batch_size_per_gpu() * self.run.degree
        if train_batch_size < share or train_batch_size % share:
            what = f"a batch of {train_batch_size} is no multiple of microbatches of all ranks, {share}"
            raise ShoalError(
                what, fix=f"engine.set_train_batch_size({max(1, train_batch_size // share) * share})", code="E006"
            )
        if self.accumulation.is_open:
            raise ShoalError(
                "the batch size cannot change inside of a step",
                fix="engine.set_train_batch_size(...) after the step() that updates the model",
                code="E015",
            )
        self.accumulation.number = train_batch_size // share

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a microbatch, which the script's loader gives; their number stays."""
        if micro_batch_size < 1:
            what = f"a microbatch must have at least 1 sample, got {micro_batch_size}"
            raise ShoalError(what, fix="engine.set_train_micro_batch_size(1)", code="E006")
        self.translation.plan["mb"] = micro_batch_size

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the model."""
        return self.accumulation.is_boundary

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next forward and backward are the last of a step, in place of the config; None: the config
        says it again. Call it before the forward."""
        self.accumulation.boundary = is_boundary

    # ---- the last step -----------------------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None: there was none."""
        return None if self.run.report is None else float(self.run.report.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum of each group of parameters, or its betas."""
        return [group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self._groups()]

    def get_type(self) -> list[Any]:
        """The entry `type` of each group of parameters."""
        return [group.get("type", 0.0) for group in self._groups()]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    @property
    def global_steps(self) -> int:
        """Steps made, with those that were skipped."""
        return self.run.steps_done

    # ---- the config --------------------------------------------------------------------------------------------------

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: no clipping."""
        return self.run.updates.clip or 0.0

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.run.plan.zero or 0)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded."""
        return self.zero_optimization_stage() >= 3

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.run.plan.precision == "bf16"

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.run.plan.precision == "fp16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the factor of losses adapts, as it does under fp16."""
        return self.run.loss_scale.is_dynamic

    def loss_scale(self) -> float:
        """The factor of losses of the config; 0: it adapts, and `engine.run.loss_scale.scale` is that of now."""
        return float(self._of("fp16").get("loss_scale", 0.0))

    def steps_per_print(self) -> int | None:
        """Of the config."""
        every: int | None = self.config.get("steps_per_print", 10)
        return every

    def wall_clock_breakdown(self) -> bool:
        """Of the config."""
        return bool(self.config.get("wall_clock_breakdown", False))

    def optimizer_name(self) -> str | None:
        """The type of the config's optimizer; None: it has none."""
        return self._of("optimizer").get("type")

    def optimizer_params(self) -> dict[str, Any] | None:
        """The arguments of the config's optimizer; None: it has none."""
        return self._of("optimizer").get("params")

    def scheduler_name(self) -> str | None:
        """The type of the config's schedule; None: it has none."""
        return self._of("scheduler").get("type")

    def scheduler_params(self) -> dict[str, Any] | None:
        """The arguments of the config's schedule; None: it has none."""
        return self._of("scheduler").get("params")

    def _of(self, section: str) -> Mapping[str, Any]:
        return self.config.get(section) or {}

    # ---- places ------------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model; under ZeRO 3 its parameters are shards."""
        return self.run.module

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.run.device

    @property
    def local_rank(self) -> int:
        """The place of this rank on its machine."""
        return self.run.world.local_rank

    @property
    def global_rank(self) -> int:
        """This rank."""
        return self.run.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.run.world.size

    @property
    def dp_world_size(self) -> int:
        """The number of ranks that have samples of their own."""
        return self.run.degree

    @property
    def mp_world_size(self) -> int:
        """The number of ranks that share a layer."""
        return self.run.mesh.degree("tp")

    @property
    def mpu(self) -> None:
        """There is no object that places ranks: the config does it."""

    def get_data_parallel_rank(self) -> int:
        """The place of this rank among those that have samples of their own."""
        return self.run.coordinate

    def get_tensor_parallel_rank(self) -> int:
        """The place of this rank among those that share a layer."""
        return self.run.mesh.coordinate["tp"]

    get_model_parallel_rank = get_tensor_parallel_rank
