"""The exponential moving average of a model's weights, on every layout.

A rank averages the pieces of parameters that it holds, so no message is sent. Checkpoints of the run hold the averages
as full tensors (`ema/NAME`), so another layout can load them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.checks.settings import no_common_average
from shoal.errors import ShoalError, raise_if
from shoal.numerics.local_tensor import to_local
from shoal.train.run_state import RunState


class EMA:
    """An exponential moving average of the weights of a model, or of the model of a run.

        ema = shoal.EMA(run, decay=0.999)
        for batch in run.batches(loader):
            run.step(batch)
            ema.update()
        with ema.applied():
            print(run.evaluate(held_out))

    The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`: the first update
    copies the weights. Weights below float32 are averaged in float32. Frozen parameters have no average; one that is
    unfrozen later joins at the next update, with its value of then. `run.save` and `run.load` include it.

    of     a run with a prepared model, or a module without a run
    decay  the part of the average that stays in each update
    """

    def __init__(self, of: RunState | nn.Module, decay: float = 0.999) -> None:
        if not (isinstance(decay, float) and 0.0 <= decay < 1.0):
            raise ShoalError(f"decay must be a number from 0 to below 1, got {decay!r}", fix="decay=0.999", code="T052")
        self.decay, self.num_updates = decay, 0
        self._run = of if isinstance(of, RunState) else None
        if self._run is not None:
            _reject(self._run)
        self._named: Mapping[str, nn.Parameter] = (
            dict(of.named_parameters()) if isinstance(of, nn.Module) else of.composed.named
        )
        self.averages: dict[str, Tensor] = {}
        """Name of a parameter → the average of this rank's piece of it."""
        self._join_unfrozen()
        if self._run is not None:
            self._run.ema = self

    @property
    def weights(self) -> dict[str, Tensor]:
        """This rank's pieces of the parameters; changing them changes the model."""
        return {name: to_local(self._named[name].detach()) for name in self.averages}

    @torch.no_grad()
    def update(self) -> None:
        """Average the weights in; call it after each step."""
        self._join_unfrozen()
        weights = list(self.weights.values())
        if self.num_updates == 0:
            self.reset()
        elif weights:
            wide = [weight.to(average.dtype) for weight, average in zip(weights, self.averages.values(), strict=True)]
            torch._foreach_lerp_(list(self.averages.values()), wide, 1 - self.decay)
        self.num_updates += 1

    @torch.no_grad()
    def reset(self) -> None:
        """Start over from the weights as they are."""
        for name, weight in self.weights.items():
            self.averages[name].copy_(weight)
        self.num_updates = 0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has the averaged weights; afterwards its own again. Do not train inside."""
        if self._run is not None:
            self._run.reject_open_step("to apply an average")
        own = {name: weight.clone() for name, weight in self.weights.items()}
        if self.num_updates:  # before the first, the averages are weights of an earlier time
            self._assign(self.averages)
        try:
            yield
        finally:
            self._assign(own)

    def state_dict(self) -> dict[str, Any]:
        """The averages of this rank, for torch.save in a loop without a run."""
        return {"num_updates": self.num_updates, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, on the same layout."""
        saved = state["averages"]
        self.resume(int(state["num_updates"]), saved)
        for name in self.averages.keys() & saved.keys():
            self.averages[name].copy_(saved[name])

    @torch.no_grad()
    def resume(self, num_updates: int, saved: Container[str]) -> None:
        """Continue from a checkpoint with the averages of these parameters. Others begin with their weights."""
        for name, parameter in self._named.items():
            if num_updates and name in saved and not parameter.requires_grad:
                raise ShoalError(
                    f"the checkpoint has an average of {name}, which is frozen here: the average would be lost",
                    fix=f"unfreeze {name} before shoal.EMA(...)",
                    code="T106",
                )
        for name, weight in self.weights.items():
            if name not in saved:
                self.averages[name].copy_(weight)
        self.num_updates = num_updates

    @torch.no_grad()
    def _join_unfrozen(self) -> None:
        for name, parameter in self._named.items():
            if parameter.requires_grad and name not in self.averages:
                self.averages[name] = _wide(to_local(parameter.detach()))

    @torch.no_grad()
    def _assign(self, values: Mapping[str, Tensor]) -> None:
        if self._run is not None:
            self._run.composed.after_evaluation()  # a copy that is still gathered would be used in place of the new one
        for name, weight in self.weights.items():
            weight.copy_(values[name])


def _wide(weight: Tensor) -> Tensor:
    """A copy in float32 or more: an average in bfloat16 would lose most updates."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)


def _reject(run: RunState) -> None:
    """Raise where a run cannot have an average."""
    if run.composed.local_sgd is not None:
        raise_if([no_common_average(run.plan)])
    if run.ema is not None:
        raise ShoalError("this run has an EMA already", fix="run.ema, which is the first one", code="T054")
    if run.saved_ema:
        raise ShoalError(
            "the checkpoint that was loaded has an average, and it was loaded before there was an EMA to fill",
            fix="ema = shoal.EMA(run), and then run.load(directory)",
            code="T055",
        )
