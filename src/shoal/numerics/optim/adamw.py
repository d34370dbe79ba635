"""AdamW with moments and weights optionally in bfloat16, and with one kernel per tensor on a GPU.

torch's fused AdamW is exact and needs states in the precision of the weights. This one computes the same numbers in
float32, and stores the moments in float32 or bfloat16. Half of the 16 bytes per parameter that Adam takes are its
moments; in bfloat16 they take a quarter. Weights in bfloat16 are rounded too, with no other copy of them. Rounding is
stochastic, and reproducible for the same seed, step and parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.errors import Problem, ShoalError, listed, raise_if
from shoal.numerics.local_tensor import to_local
from shoal.numerics.optim.adamw_host import update_on_host
from shoal.numerics.optim.adamw_update import Update, update_plainly

StateDtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class AdamW(Optimizer):
    """AdamW as in torch, with moments and weights in fp32 or bf16, and one kernel per tensor on a GPU.

    params, lr, betas, eps, weight_decay    as in torch.optim.AdamW; the state has the same names and meanings
    state_dtype                             the moments in "fp32", or "bf16" with a quarter less memory per parameter
    seed                                    of the stochastic rounding to bf16

    >>> weight = torch.nn.Parameter(torch.ones(4))
    >>> optimizer = AdamW([weight], lr=1e-3, state_dtype="bf16")
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        state_dtype: StateDtype = "fp32",
        seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "state_dtype": state_dtype, "seed": seed})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and reject invalid options."""
        super().add_param_group(param_group)
        raise_if(_wrong(self.param_groups[-1]), title="shoal.AdamW")

    _step_supports_amp_scaling = True
    """See `numerics.optim.takes_scale`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is rejected."""
        reject_closure(self, closure)
        self._step_groups(self.param_groups)

    def _step_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        divisor, dropped = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        first = self.param_groups[0]
        first["num_calls"] = first.get("num_calls", 0) + 1  # seeds new rounding noise for each call
        for group in groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            steps = [self._state(parameter, group)["step"] for parameter in trained]
            if steps:
                torch._foreach_add_(steps, 1.0)
                if dropped is not None:
                    torch._foreach_sub_(steps, [dropped] * len(steps))
            with _streams(trained) as streams:
                for number, parameter in enumerate(trained):
                    count = int(self.state[parameter]["step"]) if _is_on_host(parameter) else first["num_calls"]
                    seed = _seed(group["seed"], count, parameter)
                    with streams[number % len(streams)]:
                        self._update(parameter, group, seed, divisor, dropped)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch does, and then correct it. torch casts all moments to the precision of the weights, and
        leaves counters on their device. So moments are copied again in their own precision. Group options that torch's
        AdamW does not have keep this optimizer's values."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            for parameter in group["params"]:
                number = numbers.pop(0)
                if parameter not in self.state:
                    continue
                state, saved = self.state[parameter], state_dict["state"][number]
                if "step" not in state:  # a matrix of Muon
                    continue
                state["step"] = state["step"].to(to_local(parameter).device, torch.float32, copy=True)
                for name in ("exp_avg", "exp_avg_sq"):  # in the memory layout of the weights, too
                    state[name] = torch.empty_like(parameter, dtype=_dtype_for(parameter, group)).copy_(saved[name])

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            dtype = _dtype_for(parameter, group)
            state["step"] = torch.zeros((), dtype=torch.float32, device=to_local(parameter).device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        return state

    def _update(
        self, parameter: Tensor, group: dict[str, Any], seed: int, divisor: Tensor | None, dropped: Tensor | None
    ) -> None:
        state = self.state[parameter]
        assert parameter.grad is not None
        tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        weight, gradient, first, second = map(to_local, tensors)
        update = Update(
            step=state["step"],
            lr=float(group["lr"]),
            betas=group["betas"],
            eps=group["eps"],
            decay=group["weight_decay"],
            seed=seed,
            divisor=divisor,
            dropped=dropped,
        )
        # The kernel runs over memory in order, whatever the strides are.
        is_alike = _is_dense(weight) and first.stride() == second.stride() == weight.stride()
        if weight.is_cuda and weight.dtype in _DTYPES.values() and is_alike:
            if gradient.stride() != weight.stride():
                gradient = torch.empty_like(weight).copy_(gradient)
            from shoal.numerics.kernels.adamw import update_in_one_pass  # Triton, which CPUs do not have

            update_in_one_pass(weight, gradient, first, second, update)
        elif _is_on_host(weight):
            update_on_host(weight, gradient, first, second, update)
        else:
            update_plainly(weight, gradient, first, second, update)


def reject_closure(optimizer: Optimizer, closure: Callable[[], Any] | None) -> None:
    """Reject a closure, which would compute the loss again."""
    if closure is not None:
        raise ShoalError(
            f"shoal.{type(optimizer).__name__} takes no closure",
            fix="loss = closure(), and then optimizer.step()",
            code="T037",
        )


@contextmanager
def _streams(parameters: Sequence[Tensor]) -> Iterator[Sequence[AbstractContextManager[Any]]]:
    """Yield streams to use alternately. On a GPU these are the current stream and another one, so that an update starts
    while the last programs of the previous one still run; later work waits for both."""
    devices = {to_local(parameter).device for parameter in parameters}
    if len(devices) != 1 or any(device.type != "cuda" for device in devices):
        yield [nullcontext()]
        return
    (device,) = devices
    here, beside = torch.cuda.current_stream(device), _stream_beside(device)
    beside.wait_stream(here)
    try:
        yield [nullcontext(), torch.cuda.stream(beside)]
    finally:
        here.wait_stream(beside)


@functools.cache
def _stream_beside(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _wrong(group: dict[str, Any]) -> Iterator[Problem]:
    if group["state_dtype"] not in _DTYPES:
        got = group["state_dtype"]
        yield Problem("T036", f"state_dtype must be {listed(map(repr, _DTYPES))}, got {got!r}", 'state_dtype="fp32"')
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0.0:
            yield Problem("T036", f"{name} must be 0 or more, got {group[name]}", f"{name}=0.0")
    if not all(0.0 <= beta < 1.0 for beta in group["betas"]):
        yield Problem("T036", f"betas must be two numbers from 0 to below 1, got {group['betas']}", "betas=(0.9, 0.95)")


def _dtype_for(parameter: Tensor, group: dict[str, Any]) -> torch.dtype:
    return _DTYPES[group["state_dtype"]] if parameter.dtype in _DTYPES.values() else parameter.dtype


def _is_on_host(x: Tensor) -> bool:
    """Whether the host may read its step without a wait. There `step` is also called for some parameters at a time."""
    return to_local(x).device.type == "cpu"


def _is_dense(x: Tensor) -> bool:
    """Whether its numbers are adjacent in memory, in any order."""
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


def _seed(seed: int, num_calls: int, parameter: Tensor) -> int:
    """Return the seed of the rounding of one parameter in one step. It depends on shapes only, so that copies of a
    parameter, on other ranks or stages, are rounded alike."""
    for part in (num_calls, *parameter.shape):
        seed = (seed * 1_000_003 + part) % 2**30
    return seed
