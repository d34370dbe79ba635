"""Load torch._dynamo, the front end of torch.compile, only when something compiles.

torch's optimizers, DDP and FSDP2 import it to mark functions that must not be compiled. The import takes 0.7 to 1.8 s,
a quarter of a run's time to its first step (measured, Intel Xeon, torch 2.13), and most CPU runs compile nothing.

A stub takes its place in `sys.modules`. It has the names that eager training uses; each does what the original does
when nothing is compiled. Any other name, or a submodule, loads the original, which then replaces the stub:

    import torch._dynamo             the stub
    torch._dynamo.disable(f)         calls f; calls the original's disable(f) once that is loaded
    torch._dynamo.config, .utils     the original: loaded now

Only `shoal train` calls `install`, in processes of its own. A test compares the names with torch's own use of them.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, MutableSequence, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"


def install() -> None:
    """Install the stub, unless the original is loaded already."""
    import torch

    if NAME not in sys.modules:
        stand_in = _StandIn(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
        sys.meta_path.insert(0, _Submodules())


def is_loaded() -> bool:
    """Whether the original is loaded."""
    return not isinstance(sys.modules.get(NAME), _StandIn | None)


def load() -> ModuleType:
    """Load the original, and replace the stub by it."""
    import torch

    if isinstance(sys.modules.get(NAME), _StandIn):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Submodules)]
        del sys.modules[NAME]
        del torch._dynamo
    return importlib.import_module(NAME)


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **how: Any) -> Any:
    if fn is None:
        return functools.partial(_disable, recursive=recursive, **how)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled() if is_loaded() else fn)(*args, **kwargs)

    @functools.cache
    def disabled() -> Callable[..., Any]:
        return load().disable(fn, recursive, **how)  # type: ignore[no-any-return]

    return call


def _assume_constant_result(fn: Callable[..., Any]) -> Callable[..., Any]:
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # all that the original does
    return fn


class _CompiledModules(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return is_loaded() and isinstance(instance, load().OptimizedModule)


class _OptimizedModule(metaclass=_CompiledModules):
    """Placeholder for the class of compiled modules: it has no instance until the original is loaded."""


def _reject_special(name: str) -> None:
    """Reject dunder names: `inspect` reads `__file__` of every module, during imports too, and must not load
    anything."""
    if name.startswith("__"):
        raise AttributeError(name)


class _Part(ModuleType):
    """A submodule of the stub, with its functions."""

    def __init__(self, name: str, **functions: Callable[[], object]) -> None:
        super().__init__(name)
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        _reject_special(name)
        load()
        return getattr(importlib.import_module(self.__name__), name)


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: MutableSequence[str] = []  # it is a package; `_Submodules` finds its submodules
        self.disable = _disable
        self.assume_constant_result = _assume_constant_result
        self.graph_break = lambda msg="": None
        self.OptimizedModule = _OptimizedModule
        self.utils = _Part(f"{name}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")  # the default; DDP reads it
        self.trace_rules = _Part(
            f"{name}.trace_rules", clear_lru_cache=lambda: None
        )  # called when groups are destroyed

    def __getattr__(self, name: str) -> Any:
        _reject_special(name)
        return getattr(load(), name)


class _Submodules(Loader):
    """Finds `torch._dynamo.X`: loads the original, and with it X."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{NAME}."):
            return None
        load()
        return ModuleSpec(name, self) if name in sys.modules else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module has run."""
