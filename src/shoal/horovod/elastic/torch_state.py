"""State with modules, optimizers and samplers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from shoal.horovod.basics import rank
from shoal.horovod.elastic.sampler import ElasticSampler
from shoal.horovod.elastic.state import ObjectState
from shoal.horovod.objects import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class StateHandler:
    """Saves, restores and synchronizes one object that has a state dict."""

    def __init__(self, value: Any, broadcast: Callable[[Any], None]) -> None:
        self.value, self._broadcast = value, broadcast
        self.save()

    def save(self) -> None:
        """Copy its state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Load the copy."""
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Load the state of rank 0, and save it."""
        self._broadcast(self.value)
        self.save()

    def set_value(self, value: Any) -> None:
        """Take another object."""
        self.value = value
        self.save()


def _broadcast_module(module: torch.nn.Module) -> None:
    broadcast_parameters(module.state_dict(), root_rank=0)


def _broadcast_optimizer(optimizer: torch.optim.Optimizer) -> None:
    broadcast_optimizer_state(optimizer, root_rank=0)


def _broadcast_state(sampler: ElasticSampler) -> None:
    sampler.load_state_dict(broadcast_object(sampler.state_dict(), name="sampler"))


_HANDLED: list[tuple[type, Callable[[Any], None]]] = [
    (torch.nn.Module, _broadcast_module),
    (torch.optim.Optimizer, _broadcast_optimizer),
    (ElasticSampler, _broadcast_state),
]


class TorchState(ObjectState):
    """`TorchState(model=..., optimizer=..., sampler=..., epoch=0)`: each argument becomes an attribute."""

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        every = {**values, "model": model, "optimizer": optimizer}
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in every.items():
            broadcast = next((each for kind, each in _HANDLED if isinstance(value, kind)), None)
            if broadcast is None:
                plain[name] = value
            else:
                self._handlers[name] = StateHandler(value, broadcast)
                object.__setattr__(self, name, value)
        super().__init__(broadcast_object, rank, **plain)

    def save(self) -> None:
        """Copy everything to memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the copies."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_handlers", {}):
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)
