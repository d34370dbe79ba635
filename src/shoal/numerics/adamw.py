"""AdamW whose moments may be kept in bfloat16, and whose update is one kernel for each tensor on a GPU.

torch's fused AdamW is exact and needs states in the precision of the weights. This one computes the same numbers in
float32, and stores the moments in float32 or in bfloat16. Half of 16 bytes a parameter that Adam takes are its moments;
in bfloat16 they take a quarter. Rounding is at random, and the same again for the same seed, step and parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

States = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW(Optimizer):
    """Decoupled weight decay, as torch.optim.AdamW; state names and meanings are its own."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        states: States = "fp32",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states, "seed": seed}
        super().__init__(params, options)

    _step_supports_amp_scaling = True
    """See `numerics.optim.takes_scale`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient. There is no closure: gradients are those that are there."""
        assert closure is None
        divisor, dropped = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        first = self.param_groups[0]
        first["num_calls"] = first.get("num_calls", 0) + 1  # what is rounded at random is rounded anew each time
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps = [self._state(parameter, group)["step"] for parameter in trained]
            if steps:
                torch._foreach_add_(steps, 1.0)
                if dropped is not None:
                    torch._foreach_sub_(steps, [dropped] * len(steps))
            for parameter in trained:
                seed = _seed(group["seed"], first["num_calls"], parameter)
                self._update(parameter, group, seed, divisor, dropped)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does it, which would bring all moments to the precision of the weights, and leave counters where
        they come from."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for parameter in (parameter for parameter in group["params"] if parameter in self.state):
                state = self.state[parameter]
                state["step"] = state["step"].to(local(parameter).device, torch.float32)
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].to(_dtype_for(parameter, group))

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            dtype = _dtype_for(parameter, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        return state

    def _update(
        self, parameter: Tensor, group: dict[str, Any], seed: int, divisor: Tensor | None, dropped: Tensor | None
    ) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        held = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        weight, gradient, first, second = map(local, held)
        options = {
            "lr": float(group["lr"]), "betas": group["betas"], "eps": group["eps"], "decay": group["weight_decay"],
            "divisor": divisor, "dropped": dropped,
        }  # fmt: skip
        if weight.is_cuda and weight.dtype == torch.float32 and _is_dense(weight):
            if gradient.stride() != weight.stride():  # the kernel goes through memory, whatever the places in it mean
                gradient = torch.empty_like(weight).copy_(gradient)
            from shoal.numerics.adamw_kernel import update_  # Triton, which CPUs do not have

            update_(weight, gradient, first, second, state["step"], seed=seed, **options)
        else:
            generator = torch.Generator(weight.device).manual_seed(seed)
            _plain_update(weight, gradient, first, second, state["step"], generator=generator, **options)


def _dtype_for(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    return _DTYPES[group["states"]] if parameter.dtype == torch.float32 else parameter.dtype


def _is_dense(x: Tensor) -> bool:
    """Whether its numbers lie side by side in memory, in whatever order."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _seed(seed: int, num_calls: int, parameter: Tensor) -> int:
    """Of the rounding of one parameter in one step. It knows shapes only, so that copies of one parameter, on other
    ranks or on other stages, are rounded alike."""
    for part in (num_calls, *parameter.shape):
        seed = (seed * 1_000_003 + part) % 2**30
    return 2 * seed


def _plain_update(
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
    generator: torch.Generator,
    divisor: Tensor | None,
    dropped: Tensor | None,
) -> None:
    """The kernel's arithmetic, one operation after the other."""
    if dropped is not None and bool(dropped):
        return
    wide = torch.promote_types(weight.dtype, torch.float32)
    g = gradient.to(wide)
    g = g if divisor is None else g / divisor.to(wide)
    m = first.to(wide).lerp(g, 1.0 - betas[0])
    v = second.to(wide) * betas[1] + (1.0 - betas[1]) * g * g
    correction1, correction2 = (1.0 - beta ** float(step) for beta in betas)
    update = lr / correction1 * m / (v.sqrt() / correction2**0.5 + eps)
    weight.copy_(weight.to(wide) * (1.0 - lr * decay) - update)
    for moment, value in ((first, m), (second, v)):
        moment.copy_(stochastically_rounded(value, generator) if moment.dtype == torch.bfloat16 else value)


def stochastically_rounded(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 → bfloat16, up or down with chances such that the mean is x."""
    noise = torch.randint(0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    rounded = ((x.contiguous().view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def local(x: Tensor) -> Tensor:
    """The piece of a sharded tensor that this rank holds."""
    return x.to_local() if isinstance(x, DTensor) else x
