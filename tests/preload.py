"""Import all of shoal, and what its first steps would load. Commands and ranks of tests are forks of a process that has
done so: each would spend its seconds anew. Nothing is computed, so that forks can compute."""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil
import warnings

import functorch.compile  # noqa: F401
import numpy.ma  # noqa: F401
import torch._dynamo
import torch._inductor.cudagraph_trees
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining.schedules  # noqa: F401

import shoal


def load_shoal() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="shoal")  # as in a test that imports it
        for module in pkgutil.walk_packages(shoal.__path__, "shoal."):
            with contextlib.suppress(ModuleNotFoundError):  # triton, where there is no GPU
                if not module.name.endswith("__main__"):
                    importlib.import_module(module.name)


def load_models() -> None:
    """The models of transformers that the tests of `make test` build, where it is installed."""
    with contextlib.suppress(ModuleNotFoundError):
        import transformers

        from tests.huggingface import CLASSES, CONFIGS, LISTED

        for name, _ in LISTED.values():
            getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))
            getattr(transformers, CONFIGS.get(name, f"{name}Config"))


def settle() -> None:
    """No fork looks for garbage among what is loaded: that takes half a second each time, and copies its memory."""
    gc.collect()
    gc.freeze()


load_shoal()
settle()
