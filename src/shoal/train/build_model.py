"""From a name to a model: shoal's own and a user's `file.py:function` are found and called the same way."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shoal.blueprint.description import Description
from shoal.blueprint.plan import Plan
from shoal.checkpoint.formats.adapter import load_adapter
from shoal.config.pretrained_folder import PREFIX
from shoal.config.recipe import LoraSection, ModelSection
from shoal.errors import ShoalError, listed, nearest
from shoal.numerics.init import can_fill, has_init_rule, init_adapters, initialise
from shoal.parallel.lora.apply import lora
from shoal.parallel.lora.quantize import pack_later
from shoal.train.model_prefix import function_for


def build_model(section: ModelSection) -> nn.Module:
    """Call the builder that the section names, with the section's other keys as arguments."""
    builder = find_builder(section.name)
    arguments = section.arguments
    _check_arguments(section.name, builder, arguments)
    try:
        model = builder(**arguments)
    except SystemExit as ended:
        raise ShoalError(
            f"{section.name} ended the program: sys.exit({ended.code})", fix="return the model", code="M004"
        ) from None
    if not isinstance(model, nn.Module):
        raise ShoalError(
            f"{section.name} returned {type(model).__name__}, not an nn.Module",
            fix="return the model from that function",
            code="M004",
        )
    return model if section.lora is None else add_lora(model, section.lora)


def from_pretrained(name: str, *, init: str = "weights", trust_remote_code: bool = False, **config: Any) -> Any:
    """Build a model of transformers without memory; `run.prepare` reads, on each rank, its part of the files.

        model = shoal.from_pretrained("Qwen/Qwen3-0.6B")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        model, optimizer = run.prepare(model, optimizer)

    It is of the class that config.json names, in training mode, and in float32 until a plan or `param_dtype` says
    otherwise. Files are compared with the model now; values are read by `prepare`.

    name               a folder as save_pretrained writes it, or a name on the hub; `hf:` may be in front
    init               weights, or random: drawn from the seed of the run by transformers' own rules
    trust_remote_code  run Python files of the folder
    config             values in place of those of config.json, such as num_hidden_layers=4
    """
    full_name = name if name.startswith(PREFIX) else f"{PREFIX}{name}"
    build = function_for("FOR_LOOPS", full_name)
    assert build is not None
    return build(full_name, init=init, trust_remote_code=trust_remote_code, **config)


def is_name(thing: object) -> bool:
    """Whether a text is such a name, with its prefix."""
    return isinstance(thing, str) and function_for("FOR_LOOPS", thing) is not None


def add_lora(model: nn.Module, section: LoraSection) -> nn.Module:
    """The model with LoRA as a recipe says, or as the folder of an adapter."""
    if section.adapter is not None:
        return load_adapter(model, section.adapter)
    targets = section.targets if isinstance(section.targets, str) else list(section.targets)
    return lora(
        model,
        rank=section.rank,
        alpha=section.alpha,
        targets=targets,
        dropout=section.dropout,
        modules_to_save=section.modules_to_save,
    )


def without_memory(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model with shapes and without values, or None where a user's function cannot build it so.

    Code that looks at values while it builds (`torch.linspace(...).tolist()`) is right, and fails on the meta device.
    If it is wrong, the first rank to run it says so.
    """
    try:
        with torch.device("meta"), _WithoutDraws():
            return build()
    except ShoalError:
        raise
    except Exception:
        return None


class _WithoutDraws(TorchFunctionMode):
    """Skip normal draws on the meta device, which has no values. torch's own no-op imports sympy, which takes 0.4 s."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_ or func is Tensor.normal_:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


def build_for_layout(section: ModelSection, seed: int) -> nn.Module:
    """The model, without values if it says how every one of them is drawn: then no rank ever holds all of it. Else with
    the values that it draws itself, the same on every rank. The frozen weights below its adapters are packed when it is
    laid out, if the section says so."""
    model = _build_for_layout(section, seed)
    if section.lora is not None and section.lora.base is not None:
        pack_later(model)
    return model


def _build_for_layout(section: ModelSection, seed: int) -> nn.Module:
    model = without_memory(lambda: build_model(section))
    if model is not None and can_fill(model):
        return model
    torch.manual_seed(seed)
    model = build_model(section)
    if has_init_rule(model):
        initialise(model, seed)
    elif section.lora is not None and section.lora.adapter is None:
        init_adapters(model, seed)
    return model


def describe(model: nn.Module) -> Description:
    """What the model says about itself, or an adapter of its package; else an empty description."""
    method = getattr(model, "describe", None)
    if not callable(method):
        adapter = adapter_of(model)
        return Description() if adapter is None else adapter.describe(model)
    description = method()
    if isinstance(description, Mapping):  # what else it may return is not meant for us
        raise ShoalError(
            f"describe() of {type(model).__name__} returned a {type(description).__name__}",
            fix="return shoal.Description(...)",
            code="M005",
        )
    return description if isinstance(description, Description) else Description()


def adapter_of(model: nn.Module) -> Any | None:
    """The module of shoal that knows models of this package; None: there is none. It also adapts a model with a
    description of its own."""
    adapters: dict[str, str] = importlib.import_module("shoal.models").ADAPTERS
    packages = (kind.__module__.partition(".")[0] for kind in type(model).__mro__)
    return next((importlib.import_module(adapters[package]) for package in packages if package in adapters), None)


def adapt(model: nn.Module, description: Description, plan: Plan | None, *, fused: bool = False) -> str | None:
    """Make the model of another package fit for a plan, in place; None: for a trace on the meta device. `fused`: swap
    in layers that compute the same faster, and return one line about them."""
    adapter = adapter_of(model)
    return None if adapter is None else adapter.adapt(model, description, plan, fused=fused)


def find_builder(name: str) -> Callable[..., Any]:
    """`llama` → shoal's own builder; `path/to/file.py:function` → that function; `hf:PATH` → one of transformers."""
    builders: dict[str, str] = importlib.import_module("shoal.models").BUILDERS
    if name in builders:
        module_name, _, function = builders[name].partition(":")
        return _function_of(importlib.import_module(module_name), function, name)
    by_prefix = function_for("PREFIXES", name)
    if by_prefix is not None:
        found: Callable[..., Any] = by_prefix(name)
        return found
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        near = nearest(name, builders)
        fix = f"--model.name {listed(builders)}, or path/to/file.py:function, or hf:FOLDER"
        if Path(name, "config.json").is_file():
            fix = f"--model.name hf:{name}"
        elif near:
            fix = f"did you mean {near}? Else {fix}"
        raise ShoalError(f"there is no model {name!r}", fix=fix, code="M001")
    return _function_of(_load_file(Path(path)), function, name)


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ShoalError(
            f"there is no file {str(path)!r} to take the model from",
            fix="--model.name path/to/file.py:function",
            code="M001",
        )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickling look a module up by name
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python path/to/file.py` would
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ShoalError(
            f"{str(path)!r} cannot be loaded: {type(error).__name__}: {error}{_place_of(error, path)}",
            fix=f"python {path} must run without an error",
            code="M002",
        ) from error
    return module


def _place_of(error: Exception, path: Path) -> str:
    """The last line of the file that led to the error; a SyntaxError says it itself."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path.absolute())]
    return f" (line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def _function_of(module: Any, function: str, name: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        near = nearest(function, names)
        raise ShoalError(
            f"{name!r}: that file has no function {function!r}",
            fix=f"did you mean {near}?" if near else f"def {function}(): ... in that file, which returns the model",
            code="M001",
        )
    return found  # type: ignore[no-any-return]


def _check_arguments(name: str, builder: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Reject a key that a user's function does not take; shoal's own builders check theirs by themselves."""
    signature = inspect.signature(builder)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters)
        raise ShoalError(
            f"{name} cannot be called with the keys under `model:`: {error}",
            fix=f"keys that it takes: {takes}" if takes else "leave them out: it takes no argument",
            code="M003",
        ) from None
