"""Import all of shoal, and what its first steps would load. Commands and ranks of tests are forks of a process that has
done so: each would spend its seconds anew. Nothing is computed, so that forks can compute."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp  # noqa: F401

import shoal

for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
    with contextlib.suppress(ModuleNotFoundError):  # triton, where there is no GPU
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
