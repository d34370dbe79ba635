"""`offload=optimizer`: the optimizer's state, and the copy of the weights that it updates, are in host memory. With
`offload=optimizer:FOLDER` the state is in files.

Adam's state is twice the size of the weights, and is read once a step. So the optimizer updates copies in host memory,
one bucket of parameters after the other. While it updates one, gradients of the next come to the host, and new weights
of the last return to the device:

    device to host   g0  g1  g2  g3
    optimizer            w0  w1  w2  w3
    host to device           w0  w1  w2  w3

Parameters that are in host memory already, because the device is a CPU, are not copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.numerics.offload.page_locked import PageLocked
from shoal.numerics.offload.state_files import ARENA, StateFiles
from shoal.numerics.optim.adamw import AdamW

BUCKET = 2**28
"""Bytes of gradients that are updated at once: long enough to hide the start of a copy, and short beside a step."""
SLOTS = 2
"""Buckets of gradients in host memory: one is updated while the next arrives."""
ALIGNMENT = 64
"""Bytes. The gradients of a bucket begin at cache lines."""
BY_PARAMETER = (
    *(torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, AdamW),
)
"""Optimizers whose `step` may be called for some parameters at a time: they skip those without a gradient, and keep all
state by parameter."""
Pair = tuple[nn.Parameter, nn.Parameter]
"""A parameter on the device, and its copy on the host."""


class HostCopies:
    """Copies of an optimizer's parameters in host memory, which replace them in the optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        piece: Callable[[Tensor], Tensor],
        *,
        folder: str | None = None,
        bucket: int = BUCKET,
    ) -> None:
        self.optimizer, self.piece, self.bucket = optimizer, piece, bucket
        self.pairs: list[Pair] = []
        self.memory = PageLocked()
        for group in optimizer.param_groups:
            here = [self._copied(parameter) for parameter in group["params"]]
            self.pairs += zip(group["params"], here, strict=True)
            group["params"] = here
        for parameter, host in self.pairs:
            _move_state(optimizer, parameter, host)
        self.versions = [self._version(parameter) for parameter, _ in self.pairs]
        device = next((parameter.device for parameter, _ in self.pairs), torch.device("cpu"))
        self.inward, self.outward = _Stream(device), _Stream(device)
        self.slots: list[Tensor] = []
        states = 2 * sum(_bytes(host) + mmap.PAGESIZE for _, host in self.pairs)
        self.files = None if folder is None else StateFiles(Path(folder), min(ARENA, states))
        self.in_files: dict[tuple[nn.Parameter, str], Tensor] = {}

    def _copied(self, parameter: nn.Parameter) -> nn.Parameter:
        own = self.piece(parameter.detach())
        if own.device.type == "cpu":
            return nn.Parameter(own, requires_grad=parameter.requires_grad)
        host = self.memory.empty(own.shape, own.dtype, for_device=own.device)
        return nn.Parameter(host.copy_(own), requires_grad=parameter.requires_grad)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient, by buckets."""
        self._take_changes()
        buckets = list(self._buckets())
        self._make_slots(buckets)
        arrived = [self._fetch(bucket, slot) for bucket, slot in zip(buckets, self.slots, strict=False)]
        for number, bucket in enumerate(buckets):
            gradients, is_here = arrived[number]
            is_here()
            for (_, host), gradient in zip(bucket, gradients, strict=True):
                host.grad = gradient
            self._expect(buckets[number + 1 : number + 2])
            self.optimizer.step()
            for _, host in bucket:
                host.grad = None
            self._keep_states(bucket)
            if number + SLOTS < len(buckets):  # into the memory that has just become free
                arrived.append(self._fetch(buckets[number + SLOTS], self.slots[number % SLOTS]))
            self._return(bucket)
        self.outward.join()
        self.versions = [self._version(parameter) for parameter, _ in self.pairs]

    def _take_changes(self) -> None:
        """Copy weights to the host that were changed on the device since the last step: by the script, or by a load."""
        for (parameter, host), version in zip(self.pairs, self.versions, strict=True):
            if parameter.device != host.device and self._version(parameter) != version:
                host.copy_(self.piece(parameter.detach()))

    def _version(self, parameter: nn.Parameter) -> int:
        return num_changes(self.piece(parameter.detach()))

    def _buckets(self) -> Iterator[list[Pair]]:
        """Pairs with a gradient in the order of the parameters; all at once for an optimizer that steps as a whole."""
        bucket: list[Pair] = []
        limit = self.bucket if _steps_by_parameter(self.optimizer) else None
        size = 0
        for pair in self.pairs:
            if pair[0].grad is None:
                continue
            own = self._size(pair)
            if bucket and limit is not None and size + own > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append(pair)
            size += own
        if bucket:
            yield bucket

    def _size(self, pair: Pair) -> int:
        return 0 if pair[0].grad is None else _bytes(self.piece(pair[0].grad))

    def _make_slots(self, buckets: list[list[Pair]]) -> None:
        """Memory for gradients on the host, once: it lasts for all steps."""
        needed = max((sum(map(self._size, bucket)) for bucket in buckets), default=0)
        device = self.pairs[0][0].device
        if device.type == "cpu":
            self.slots = [torch.empty(0, dtype=torch.uint8)] * SLOTS
        elif len(self.slots) < (count := min(SLOTS, len(buckets))) or self.slots[0].numel() < needed:
            self.slots = [self.memory.empty((needed,), torch.uint8, for_device=device) for _ in range(count)]

    def _fetch(self, bucket: list[Pair], slot: Tensor) -> tuple[list[Tensor], Callable[[], None]]:
        """Start to copy the gradients of a bucket to the host. Returns them, and a function that waits for them."""
        if bucket[0][1].device == bucket[0][0].device:
            return [self.piece(parameter.grad) for parameter, _ in bucket if parameter.grad is not None], lambda: None
        gradients: list[Tensor] = []
        begin = 0
        with self.inward.after_the_device():
            for parameter, _ in bucket:
                assert parameter.grad is not None
                own = self.piece(parameter.grad)
                room = slot[begin : begin + own.numel() * own.element_size()]
                gradients.append(room.view(own.dtype).view(own.shape).copy_(own, non_blocking=True))
                begin += _bytes(own)
        return gradients, self.inward.marked()

    def _return(self, bucket: list[Pair]) -> None:
        """Start to copy new weights to the device."""
        with self.outward.after_the_device():
            for parameter, host in bucket:
                if parameter.device != host.device:
                    self.piece(parameter.detach()).copy_(host, non_blocking=True)

    def _states(self, bucket: list[Pair]) -> Iterator[tuple[nn.Parameter, dict[str, Any], str, Tensor]]:
        """The states of a bucket that are as large as their parameters: of which, and the dictionary that has them.

        A rank has no row of a tensor with fewer rows than ranks, and a state without elements needs no file."""
        for _, host in bucket:
            if not host.numel():
                continue
            for key, value in list(self.optimizer.state.get(host, {}).items()):
                if isinstance(value, Tensor) and value.numel() == host.numel():
                    yield host, self.optimizer.state[host], key, value

    def _expect(self, next_ones: list[list[Pair]]) -> None:
        """Read the states of the next bucket ahead."""
        if self.files is not None:
            self.files.expect(value for bucket in next_ones for *_, value in self._states(bucket))

    def _keep_states(self, bucket: list[Pair]) -> None:
        """Put states that the optimizer has just made, or that were loaded, into files."""
        if self.files is not None:
            for host, states, key, value in self._states(bucket):
                if not self.files.holds(value):
                    states[key] = self._in_file(self.files, host, key, value)

    def _in_file(self, files: StateFiles, host: nn.Parameter, key: str, value: Tensor) -> Tensor:
        """A state in its file: a loaded one takes the place of the one before."""
        held = self.in_files.get((host, key))
        if held is not None and (held.shape, held.dtype) == (value.shape, value.dtype):
            return held.copy_(value)
        self.in_files[host, key] = files.hold(value)
        return self.in_files[host, key]


class _Stream:
    """Copies beside the device's own work. On a CPU they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def after_the_device(self) -> Any:
        """A block whose copies start when the device has done what was queued before."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        return torch.cuda.stream(self.stream)

    def marked(self) -> Callable[[], None]:
        """A function that waits on the host for the copies that were queued so far."""
        return (lambda: None) if self.stream is None else self.stream.record_event().synchronize

    def join(self) -> None:
        """Let the device wait for all copies."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


def _move_state(optimizer: Optimizer, parameter: nn.Parameter, host: nn.Parameter) -> None:
    """Give the copy the state of its parameter: of steps before, or of an optimizer that makes it at once."""
    if parameter in optimizer.state:
        state = optimizer.state.pop(parameter)
        here = {key: value.to("cpu") if isinstance(value, Tensor) else value for key, value in state.items()}
        optimizer.state[host] = here


def num_changes(tensor: Tensor) -> int:
    """How often a tensor was changed in place; views and detached ones count together. torch counts for autograd."""
    return tensor._version


def _bytes(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _steps_by_parameter(optimizer: Optimizer) -> bool:
    """Whether several calls of `step`, each with the gradients of some parameters, are the same as one. A hook of the
    script's own would be called by each of them."""
    return type(optimizer) in BY_PARAMETER and num_step_hooks(optimizer) <= 1


def num_step_hooks(optimizer: Optimizer) -> int:
    """Functions that an optimizer calls before and after a step. `Run.prepare` adds one; torch does not list them."""
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
