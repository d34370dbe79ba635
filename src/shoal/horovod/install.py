"""Let `import horovod.torch as hvd` find this module, after an explicit call."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from shoal.errors import ShoalError

_PARTS = {
    "horovod.torch.compression": "shoal.horovod.compression",
    "horovod.torch.elastic": "shoal.horovod.elastic",
    "horovod.torch.elastic.sampler": "shoal.horovod.elastic.sampler",
    "horovod.torch.elastic.state": "shoal.horovod.elastic.torch_state",
    "horovod.torch.functions": "shoal.horovod.objects",
    "horovod.torch.optimizer": "shoal.horovod.optimizer.distributed",
    "horovod.torch.sync_batch_norm": "shoal.horovod.sync_batch_norm",
    "horovod.common.elastic": "shoal.horovod.elastic.state",
    "horovod.common.exceptions": "shoal.horovod.errors",
    "horovod.common.process_sets": "shoal.horovod.process_sets",
}


def install() -> None:
    """Register `horovod`, `horovod.torch` and their usual parts in `sys.modules`. A second call does nothing.

    It is never done by itself: a module that replaces another must be visible in the script.
    """
    if getattr(sys.modules.get("horovod"), "__shoal__", False):
        return
    if _is_installed():
        what = "install() would hide the package horovod, which is installed"
        raise ShoalError(what, fix="pip uninstall horovod, or import shoal.horovod as hvd", code="H015")
    api = importlib.import_module("shoal.horovod")
    public = {name: value for name, value in vars(api).items() if not name.startswith("_")}
    top, torch_part = _module("horovod"), _module("horovod.torch", **public)
    common, ops = _module("horovod.common"), _module("horovod.torch.mpi_ops", **public, _basics=_Basics())
    top.__dict__.update(torch=torch_part, common=common, __version__="0.28.1+shoal", __shoal__=True)
    torch_part.__dict__["mpi_ops"] = ops
    for module in (top, torch_part, common, ops):
        sys.modules[module.__name__] = module
    for name, ours in _PARTS.items():
        part = importlib.import_module(ours)
        sys.modules[name] = part
        parent, _, child = name.rpartition(".")
        if parent in ("horovod.torch", "horovod.common"):
            setattr(sys.modules[parent], child, part)


def _is_installed() -> bool:
    """Whether there is a package horovod. A folder of that name without an `__init__.py` is none, also if an import
    has found it before."""
    loaded = sys.modules.get("horovod")
    if loaded is not None and loaded.__spec__ is None:  # made by hand
        return True
    spec = importlib.util.find_spec("horovod")
    return spec is not None and spec.origin is not None


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name, "shoal.horovod under the name of Horovod")
    module.__path__ = []  # a package: its parts are found in sys.modules
    module.__dict__.update(content)
    return module


class _Basics:
    """The object that some scripts reach for as `hvd.mpi_ops._basics`."""

    def __getattr__(self, name: str) -> Any:
        if name == "_get_process_set_ids_and_ranks":
            return importlib.import_module("shoal.horovod.process_sets").ids_and_ranks
        return getattr(importlib.import_module("shoal.horovod.basics"), name)
