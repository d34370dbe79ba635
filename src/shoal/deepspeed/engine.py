"""The engine of DeepSpeed on a `Run`: forward, backward and step as scripts call them.

    engine(x) ─ enters a microbatch ─ engine.backward(loss) ─ engine.step() ─ leaves it
                                                                 └ the last of a step: update, schedule

Every microbatch's mean counts the same, over microbatches and ranks, as in DeepSpeed (`loss_mean="microbatch"`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from shoal.config.deepspeed.translation import Translation
from shoal.deepspeed import build, checkpoint, members
from shoal.deepspeed.accumulation import Accumulation
from shoal.deepspeed.engine_state import EngineState
from shoal.deepspeed.rounded_gradients import RoundedGradients
from shoal.errors import ShoalError
from shoal.train.run import Run


class Engine(EngineState):
    """What `initialize` returns. Attributes that neither it nor DeepSpeed's engine has are the model's."""

    def __init__(
        self,
        run: Run,
        found: Translation,
        optimizer: Optimizer | None,
        schedule: Any,
        *,
        rounding: RoundedGradients | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.run, self.translation, self._rounding = run, found, rounding
        self.config = config or {}
        self.optimizer, self.lr_scheduler = optimizer, schedule
        self.training_dataloader: DataLoader[Any] | None = None
        self.micro_steps = self.skipped_steps = self.global_samples = 0
        self.drops_last = any(line.key == "dataloader_drop_last" and line.value is True for line in found.lines)
        """Whether the loader of `initialize` leaves out a microbatch with fewer samples than others."""
        self.accumulation = Accumulation(run)
        self.accumulation.number = found.num_accumulated or 1
        self._was_applied = self._has_warned = False
        if optimizer is not None:
            self._guard_gradients(optimizer)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Call the model."""
        return self.forward(*inputs, **options)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model. In training the call belongs to the microbatch of the next `backward`."""
        if self.run.model.training and torch.is_grad_enabled() and self.optimizer is not None:
            self.accumulation.enter()
        return self.run.model(*inputs, **options)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **others: Any) -> Tensor:
        """Run the backward of the mean loss of a microbatch, divided by the number of microbatches of a step."""
        members.reject_unknown(
            "backward", others, {"allreduce_gradients": True, "release_loss": False}, members.arguments(Engine.backward)
        )
        self._check_backward(loss, retain_graph)
        self.accumulation.enter()
        number = self.gradient_accumulation_steps()
        self.run.backward(loss if scale_wrt_gas else loss * number)
        self.accumulation.after_backward()
        return loss.detach() / number if scale_wrt_gas else loss.detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """End the microbatch; after the last one of a step, update the model and step the schedule."""
        self._was_applied = False
        if self.accumulation.is_unsynced:
            raise ShoalError("step() inside of no_sync()", fix="engine.step() after the block", code="E015")
        if not self.accumulation.has_backward:
            raise ShoalError("step() without a backward", fix="engine.backward(loss) before engine.step()", code="E015")
        is_boundary = self.accumulation.end_microbatch()
        self.micro_steps += 1
        if not is_boundary:
            return
        report = self.run.update()
        self.global_samples += self.train_batch_size()
        if self._drops_updates and report.was_skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._was_applied = True

    def was_step_applied(self) -> bool:
        """Whether the last `step` has updated the model."""
        return self._was_applied and self.run.report is not None and not self.run.report.was_skipped

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients of this rank add up, and a backward ends a microbatch in place of `step`. They are averaged
        over ranks in the next backward outside of it. All stages of ZeRO have it; DeepSpeed's 2 and 3 have not."""
        if self.accumulation.is_unsynced:
            raise ShoalError("no_sync() inside of no_sync()", fix="with engine.no_sync(), once", code="E015")
        with self.accumulation.without_sync():
            yield

    def train(self, mode: bool = True) -> Engine:
        """Set the model to training."""
        self.run.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the model to evaluation."""
        self.run.model.eval()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing is left to clear after a step: `step` does. Raise after a backward, whose gradients would be lost."""
        if self.accumulation.has_gradients:
            raise ShoalError(
                "zero_grad() inside of a step would drop the gradients of its first microbatches",
                fix="remove it: engine.step() clears gradients after each update",
                code="E015",
            )

    def compile(self, **options: Any) -> None:
        """The blocks of the model are compiled since `initialize`, if the config says so; else raise."""
        if not self.run.policies.compute.compile:
            raise ShoalError(
                "engine.compile() comes after the model was placed",
                fix='"compile": {"deepcompile": true} in the config',
                code="E018",
            )

    def empty_partition_cache(self) -> None:
        """Let go of gathered parameters."""
        self.run.composed.after_evaluation()

    def deepspeed_io(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Sampler[Any] | None = None,
        collate_fn: Any = None,
        **others: Any,
    ) -> DataLoader[Any]:
        """A loader of this rank's microbatches, as `initialize(training_data=...)` makes one."""
        members.reject_unknown("deepspeed_io", others, {"num_local_io_workers": None})
        return build.build_loader(
            dataset,
            self.run,
            micro=batch_size or self.train_micro_batch_size_per_gpu(),
            collate_fn=collate_fn,
            drop_last=self.drops_last,
            sampler=data_sampler,
            shuffle=route == "train",
        )

    def _guard_gradients(self, optimizer: Optimizer) -> None:
        """Let `optimizer.zero_grad()` raise inside of a step, too."""
        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self.zero_grad()
            clear(set_to_none)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _check_backward(self, loss: Any, retain_graph: bool) -> None:
        what = fix = ""
        if self.optimizer is None:
            what, fix = "backward needs an optimizer", '"optimizer": {"type": "AdamW"} in the config, or optimizer=...'
        elif not isinstance(loss, Tensor) or loss.numel() != 1:
            what, fix = "backward needs a loss of one number", "loss.mean()"
        elif retain_graph:
            what, fix = "backward(retain_graph=True) is not supported", "engine.backward(first + second), once"
        elif self.accumulation.is_used:
            what, fix = "backward was called twice before step()", "engine.backward(first + second), once"
        if what:
            raise ShoalError(what, fix=fix, code="E015")

    @property
    def _drops_updates(self) -> bool:
        return self.run.updates.on_nan == "skip" or self.run.loss_scale.is_dynamic

    # ---- save and load -----------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything below `save_dir/tag`, in shoal's own format, and the tag in `latest`. Every rank calls it."""
        has_frozen = any(not parameter.requires_grad for parameter in self.run.module.parameters())
        if exclude_frozen_parameters and has_frozen and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "save_checkpoint(exclude_frozen_parameters=True) saves the frozen parameters, too;"
                " save_16bit_model(..., exclude_frozen_parameters=True) leaves them out",
                stacklevel=2,
            )
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

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write all weights, whole, in the precision of the run, as a file of torch. Every rank calls it."""
        weights = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if weights is not None:
            checkpoint.write_weights(weights, Path(save_dir) / save_filename)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False, **options: Any) -> dict[str, Any]:
        """The state dict of the model, as this rank has it: under ZeRO 3 its parameters are shards."""
        frozen = checkpoint.frozen_names(self) if exclude_frozen_parameters else set()
        return {name: value for name, value in self.module.state_dict(**options).items() if name not in frozen}

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """All weights, whole, in the precision of the run, on rank 0; None on the others. Every rank calls it. Scripts
        call it by DeepSpeed's name, though that is private."""
        return checkpoint.whole_weights(self, without_frozen=exclude_frozen_parameters)

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def destroy(self) -> None:
        """Finish saves and leave the process groups."""
        if self._rounding is not None:
            self._rounding.close()
        self.run.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "run" not in self.__dict__:
            raise AttributeError(name)
        if name not in members.OF_ENGINE:
            try:
                return getattr(self.run.module, name)
            except AttributeError:
                pass
        instead = members.OF_ENGINE | members.OF_PIPELINES
        raise members.missing("engine", name, instead, [one for one in dir(type(self)) if not one.startswith("_")])
