"""The engine of DeepSpeed on a `Run`: forward, backward and step as scripts call them.

    engine(x) ─ enters a microbatch ─ engine.backward(loss) ─ engine.step() ─ leaves it
                                                                 └ the last of a step: update, schedule

Every microbatch's mean counts the same, over microbatches and ranks, as in DeepSpeed (`loss_mean="microbatch"`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.config.deepspeed.translation import Translation
from shoal.deepspeed import checkpoint
from shoal.deepspeed.rounded_gradients import RoundedGradients
from shoal.errors import ShoalError
from shoal.train.run import Run


class Engine:
    """What `initialize` returns. Attributes that it does not have are the model's."""

    def __init__(
        self,
        run: Run,
        found: Translation,
        optimizer: Optimizer | None,
        schedule: Any,
        rounding: RoundedGradients | None = None,
    ) -> None:
        self.run, self.translation, self._rounding = run, found, rounding
        self.optimizer, self.lr_scheduler = optimizer, schedule
        self.micro_steps = self.skipped_steps = 0
        self.drops_last = any(line.key == "dataloader_drop_last" and line.value is True for line in found.lines)
        """Whether the loader of `initialize` leaves out a microbatch with fewer samples than others."""
        self._microbatches: Iterator[int] | None = None
        """The microbatches of the open step; None: no step is open."""
        self._is_inside = self._has_backward = False

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        return self.forward(*inputs, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model. In training the call belongs to the microbatch of the next `backward`."""
        if self.run.model.training and torch.is_grad_enabled() and self.optimizer is not None:
            self._enter()
        return self.run.model(*inputs, **options)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run the backward of the mean loss of a microbatch, divided by the number of microbatches of a step."""
        self._check_backward(loss, retain_graph)
        self._enter()
        number = self.gradient_accumulation_steps()
        self.run.backward(loss if scale_wrt_gas else loss * number)
        self._has_backward = True
        return loss.detach() / number if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the microbatch; after the last one of a step, update the model and step the schedule."""
        if not self._has_backward:
            raise ShoalError("step() without a backward", fix="engine.backward(loss) before engine.step()", code="E015")
        is_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._is_inside = self._has_backward = False
        if not is_boundary:
            return
        assert self._microbatches is not None
        next(self._microbatches, None)  # leaves the last one
        self._microbatches = None
        report = self.run.update()
        if self._drops_updates and report.was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def train(self, mode: bool = True) -> Engine:
        """Set the model to training."""
        self.run.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model to evaluation."""
        self.run.model.eval()
        return self

    def zero_grad(self) -> None:
        """Nothing is left to clear: `step` does."""

    def _enter(self) -> None:
        if self._microbatches is None:
            self._microbatches = self.run.engine.equal_microbatches(self.gradient_accumulation_steps())
        if not self._is_inside:
            next(self._microbatches)
            self._is_inside = True

    def _check_backward(self, loss: Any, retain_graph: bool) -> None:
        what = fix = ""
        if self.optimizer is None:
            what, fix = "backward needs an optimizer", '"optimizer": {"type": "AdamW"} in the config, or optimizer=...'
        elif not isinstance(loss, Tensor) or loss.numel() != 1:
            what, fix = "backward needs a loss of one number", "loss.mean()"
        elif retain_graph:
            what, fix = "backward(retain_graph=True) is not supported", "engine.backward(first + second), once"
        elif self._has_backward:
            what, fix = "backward was called twice before step()", "engine.backward(first + second), once"
        if what:
            raise ShoalError(what, fix=fix, code="E015")

    @property
    def _drops_updates(self) -> bool:
        return self.run.updates.on_nan == "skip" or self.run.loss_scale.is_dynamic

    # ---- numbers -----------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples of a step, over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.run.degree

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a microbatch of one rank."""
        return int(self.translation.plan["mb"])

    def gradient_accumulation_steps(self) -> int:
        """Microbatches of a step, on one rank."""
        return self.translation.num_accumulated or 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the model."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients of the last step, before clipping; None: there was none."""
        return None if self.run.report is None else float(self.run.report.grad_norm)

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def was_step_applied(self) -> bool:
        """Whether the last step has updated the model."""
        return self.run.report is not None and not self._is_inside and not self.run.report.was_skipped

    def gradient_clipping(self) -> float:
        """The largest norm of the gradients; 0: no clipping."""
        return self.run.updates.clip or 0.0

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.run.plan.zero or 0)

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.run.plan.precision == "bf16"

    def fp16_enabled(self) -> bool:
        """Whether the model computes in float16."""
        return self.run.plan.precision == "fp16"

    @property
    def loss_scale(self) -> float:
        """The factor of losses under fp16; elsewhere 1."""
        return self.run.loss_scale.scale

    @property
    def global_steps(self) -> int:
        """Steps made, with those that were skipped."""
        return self.run.steps_done

    @property
    def global_samples(self) -> int:
        """Samples of the steps made."""
        return self.run.steps_done * self.train_batch_size()

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

    # ---- save and load -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
    ) -> bool:
        """Save everything below `save_dir/tag`, in shoal's own format, and the tag in `latest`. Every rank calls it."""
        checkpoint.save(self, Path(save_dir), tag, client_state or {}, save_latest=save_latest)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Resume from `load_dir/tag`, or from the tag in `latest`; return its path and the client's state.

        The order of the arguments is DeepSpeed's, since scripts give them by place.
        """
        others = {
            "load_module_strict": load_module_strict,
            "load_optimizer_states": load_optimizer_states,
            "load_lr_scheduler_states": load_lr_scheduler_states,
            "custom_load_fn": custom_load_fn,
        }
        return checkpoint.load(self, Path(load_dir), tag, load_module_only=load_module_only, others=others)

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write all weights, whole, in the precision of the run, as a file of torch. Every rank calls it."""
        checkpoint.save_weights(self, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """Finish saves and leave the process groups."""
        if self._rounding is not None:
            self._rounding.close()
        self.run.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "run" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.run.module, name)
