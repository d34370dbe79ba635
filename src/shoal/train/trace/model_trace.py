"""Find the cost of each block of any module by running it on tensors without memory.

torch can count the FLOPs of a forward (`FlopCounterMode`), show the tensors that autograd saves (`saved_tensors_hooks`)
and run without memory (`FakeTensorMode`). This file uses all three at once and assigns the costs to the
blocks of the model, so that a planner can cut, shard and recompute it. Everything here is counted, nothing measured.

Bytes that are saved for the backward:

    counted      every storage that some operation saves, once and whole, however many views of it are saved, at the
                 block that saves it first; so a block's input counts there, if the block saves it, and bytes of
                 different blocks add up. Copies of weights in lower precision, which autocast makes, count too.
    not counted  storages of parameters, buffers and of the inputs of the model, which exist anyway; and tensors that a
                 module stores outside of autograd.

The saved tensors depend on the kernels of a device: dropout saves a mask of bytes on CUDA, of floats on the CPU. So a
model is traced for a device, and for CUDA only where torch can use it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from shoal.errors import ShoalError
from shoal.numerics.precision import Precision, precision_of, silence_matmul_warning
from shoal.predict.workload import Block, Workload
from shoal.train.build_model import describe, find_builder
from shoal.train.trace.block_structure import found_blocks
from shoal.train.trace.kernel_costs import FLOPS, LSTM, launches, lstm_workspace

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""One argument of `forward`, several by position, or several by name."""

OUTSIDE = ""
"""The name of the operations outside of all blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedBlock:
    """The cost of one block for the traced batch. All numbers are counted."""

    name: str
    """The name of the submodule; "" for the operations outside of all blocks."""
    parameters: int
    """Number of elements; a tied parameter counts at its first block."""
    trained: int
    """Number of elements that need a gradient."""
    flops: float
    """FLOPs of the forward; a multiply-add is two."""
    saved: float
    """Bytes that autograd saves for the backward."""
    output: float
    """Bytes that it returns."""
    traffic: float
    """Bytes that its forward reads and writes, matrix products and attention left out."""
    kernels: int
    """Kernels that its forward launches, if nothing is fused."""
    saved_anyway: float = 0.0
    """Bytes saved beside `saved` for any number of samples, such as weights in lower precision. `trace_samples`
    separates the two; `trace` adds them."""


def trace(model: nn.Module, inputs: Inputs, *, precision: str = "fp32", device: str = "cpu") -> tuple[TracedBlock, ...]:
    """The blocks of a model in the order in which they run, each with its cost for these inputs.

    Only shapes and dtypes of model and inputs matter: both may be on the meta device. The model stays as it is, and is
    traced in the mode (train or eval) that it is in.
    """
    policy = precision_of(precision)
    _check(device)
    blocks = blocks_of(model)
    recorder = _CostRecorder({id(module): name for name, module in blocks.items()})
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        silence_matmul_warning(torch.device(device))
        stack.enter_context(_mode_of(model))
        imitate = _Imitate(policy, device)
        state = {name: imitate(tensor) for name, tensor in _state(model)}
        arguments, options = _call(tree_map_only(Tensor, imitate, inputs))
        recorder.ignore(*state.values(), *_attributes(model), *tree_leaves((arguments, options)))
        if policy.is_lower:
            stack.enter_context(torch.autocast(device, dtype=policy.compute_dtype))
        _run(model, state, arguments, options, recorder)
    return tuple(_summed(model, recorder))


def trace_samples(
    model: nn.Module, inputs: Inputs, *, precision: str = "fp32", device: str = "cpu"
) -> tuple[TracedBlock, ...]:
    """The blocks of a model with their cost for one sample, and the bytes that do not depend on the samples.

    It traces the inputs, and inputs with twice as many samples. These are counted along the first dim of the first
    tensor; every other tensor with a first dim as long has one entry for each of them, too.
    """
    num_samples = _num_samples(inputs)
    twice = tree_map_only(Tensor, lambda x: _doubled(x, num_samples), inputs)
    traces = (trace(model, each, precision=precision, device=device) for each in (inputs, twice))
    return tuple(_per_sample(once, both, num_samples) for once, both in zip(*traces, strict=True))


def workload_of(
    model: nn.Module, inputs: Inputs, *, name: str = "", precision: str = "fp32", device: str = "cpu"
) -> Workload:
    """The workload of a model for the planner, for one sample."""
    traced = trace_samples(model, inputs, precision=precision, device=device)
    return Workload(name=name or type(model).__name__, blocks=tuple(map(_as_block, traced)))


def _as_block(traced: TracedBlock) -> Block:
    return Block(
        name=traced.name,
        parameters=traced.parameters,
        flops=traced.flops,
        saved=traced.saved,
        saved_anyway=traced.saved_anyway,
        output=traced.output,
        traffic=traced.traffic,
        kernels=traced.kernels,
    )


def load(name: str, *, sequence: int | None = None, batch: int = 1) -> tuple[nn.Module, Inputs]:
    """A model without memory from `path/to/file.py:function`, and the inputs of its forward.

    The function returns the model, or the model and its inputs: `return model, torch.empty(8, 3, 224, 224)`. A model
    with an embedding needs no inputs: it gets `batch` sequences of `sequence` tokens.
    """
    found = _built(name)
    model, inputs = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        raise ShoalError(
            f"{name} returned {type(model).__name__}, not an nn.Module",
            fix="return the model from that function, or the model and a batch of its inputs",
            code="M004",
        )
    if inputs is None:
        if sequence is None or not any(isinstance(module, nn.Embedding) for module in model.modules()):
            raise ShoalError(
                f"{name} must return the inputs of its model's forward, too",
                fix="return model, inputs from that function: a batch, such as torch.empty(8, 3, 224, 224)"
                + ("; or --seq-len, if it takes tokens" if sequence is None else ""),
                code="M053",
            )
        inputs = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    return model, inputs


# ---- which blocks ---------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Name → submodule that is traced as one block: those of the model's description, with the modules before and after
    them; else the elements of its lists of similar modules, and the modules beside such lists."""
    description = describe(model)
    if description.blocks:
        names = (*description.before_blocks, *description.blocks, *description.after_blocks)
        return {name: model.get_submodule(name) for name in names}
    return found_blocks(model)


# ---- stand-ins without memory ---------------------------------------------------------------------------------------


@dataclass
class _Imitate:
    """Make a tensor of the same shape without memory, on the traced device; one for each tensor, so that tied tensors
    stay tied."""

    precision: Precision
    device: str
    made: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __call__(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self.made:
            dtype = self.precision.weight_dtype if tensor.dtype == torch.float32 else tensor.dtype
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=self.device)
            if isinstance(tensor, nn.Parameter):
                like = nn.Parameter(like, requires_grad=tensor.requires_grad)
            else:
                like.requires_grad_(tensor.requires_grad)
            self.made[id(tensor)] = tensor, like  # the first one is kept alive, so that no other tensor gets its id
        return self.made[id(tensor)][1]


def _check(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ShoalError(f"device must be cpu or cuda, got {device!r}", fix="device='cpu' or 'cuda'", code="R049")
    if device == "cuda" and not torch.cuda.is_available():
        raise ShoalError(
            "a model is traced for CUDA only where there is a CUDA device", fix="device='cpu'", code="N014"
        )


def _mode_of(model: nn.Module) -> FakeTensorMode:
    """The fake mode that the model was built in, if any: tensors of two modes cannot be combined."""
    modes = (tensor.fake_mode for _, tensor in _state(model) if isinstance(tensor, FakeTensor))
    return next(modes, None) or FakeTensorMode(allow_non_fake_inputs=True)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules hold without registering them."""
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def _built(name: str) -> Any:
    """The result of a function, without memory unless the function reads values of tensors."""
    builder = find_builder(name)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return builder()
    except Exception:  # a function that only reads values works with memory; a wrong one fails again
        pass
    try:
        return builder()
    except Exception as error:
        what = f"{name} failed: {type(error).__name__}: {error}"
        raise ShoalError(what, fix="a function without arguments that returns a model", code="M054") from error


def _call(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return ((inputs,) if isinstance(inputs, Tensor) else tuple(inputs)), {}


def _num_samples(inputs: Inputs) -> int:
    sizes = [leaf.shape[0] for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes or not sizes[0]:
        raise ShoalError(
            "the inputs must have at least one sample", fix="a tensor whose first dim counts samples", code="M053"
        )
    return int(sizes[0])


def _doubled(tensor: Tensor, num_samples: int) -> Tensor:
    is_of_samples = tensor.dim() > 0 and tensor.shape[0] == num_samples
    shape = (2 * num_samples, *tensor.shape[1:]) if is_of_samples else tensor.shape
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


# ---- recording ------------------------------------------------------------------------------------------------------


class _CostRecorder:
    """Assign costs to the block that causes them."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        """A block's id → its name."""
        self.counter = FlopCounterMode(display=False, custom_mapping=dict(FLOPS))
        self.inside = [OUTSIDE]
        self.flops: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()
        self.traffic: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()
        self.ran: dict[str, None] = {}
        self.kept: dict[int, tuple[torch.UntypedStorage, str]] = {}
        self.known: dict[int, torch.UntypedStorage] = {}
        self._charged = 0

    def ignore(self, *values: Any) -> None:
        """Do not count these tensors when they are saved."""
        for value in values:
            if isinstance(value, FakeTensor):
                storage = value.untyped_storage()
                self.known[storage._cdata] = storage

    def keep(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves. A real tensor was made by the model before, and exists anyway."""
        if isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.known:
                self.kept.setdefault(storage._cdata, (storage, self.inside[-1]))
        return tensor

    def before(self, module: nn.Module, arguments: Any) -> None:
        """Hook of every module."""
        if (name := self.names.get(id(module))) is not None:
            self.charge()
            self.inside.append(name)
            self.ran[name] = None

    def after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Hook of every module."""
        if (name := self.names.get(id(module))) is not None:
            self.charge()
            self.inside.pop()
            self.outputs[name] += sum(x.nbytes for x in tree_leaves(output) if isinstance(x, Tensor))

    def launched(self, num_bytes: int) -> None:
        """Record a kernel."""
        self.kernels[self.inside[-1]] += 1
        self.traffic[self.inside[-1]] += num_bytes

    def charge(self) -> None:
        """Assign the FLOPs since the last call to the current block."""
        total = self.counter.get_total_flops()
        self.flops[self.inside[-1]] += total - self._charged
        self._charged = total

    def saved(self, name: str) -> int:
        """Bytes of storages that a block was the first to save."""
        return sum(storage.nbytes() for storage, owner in self.kept.values() if owner == name)


class _KernelCounter(TorchDispatchMode):
    """Count kernels and their bytes, and correct the workspace of kernels that report none without memory."""

    def __init__(self, recorder: _CostRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is LSTM:
            result = (*result[:-1], result[-1].new_empty(lstm_workspace(args)))
        if launches(func):
            is_product = func.overloadpacket in self.recorder.counter.flop_registry
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.recorder.launched(0 if is_product else sum(x.nbytes for x in tensors))
        return result


def _run(
    model: nn.Module,
    state: dict[str, Tensor],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    recorder: _CostRecorder,
) -> None:
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(recorder.before).remove)
        stack.callback(register_module_forward_hook(recorder.after).remove)
        stack.enter_context(saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_KernelCounter(recorder))
        stack.enter_context(recorder.counter)
        try:
            output = torch.func.functional_call(model, state, arguments, options)
        except ShoalError:
            raise
        except Exception as error:
            raise _cannot_run(error, recorder.inside[-1]) from error
        recorder.charge()
        recorder.outputs[OUTSIDE] = sum(x.nbytes for x in tree_leaves(output) if isinstance(x, Tensor))


def _cannot_run(error: Exception, where: str) -> ShoalError:
    first_line = next(iter(str(error).splitlines()), "")
    place = f" in {where}" if where else ""
    looks_at_values = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
    if looks_at_values or "data-dependent" in first_line:
        what = f"the model reads the values of a tensor{place} ({type(error).__name__}: {first_line})"
        fix = (
            "shapes that depend on those of the inputs alone: no .item(), no nonzero(). For cuDNN's LSTM, device='cpu'"
        )
        return ShoalError(what, fix=fix, code="M055")
    return ShoalError(
        f"the model cannot be run on these inputs{place}: {type(error).__name__}: {first_line}",
        fix="model(inputs) must run without an error on real tensors of the same shapes",
        code="M056",
    )


def _summed(model: nn.Module, recorder: _CostRecorder) -> Iterator[TracedBlock]:
    all_parameters, trained = Counter[str](), Counter[str]()
    for name, parameter in model.named_parameters():
        home = _home(name, recorder.names.values())
        all_parameters[home] += parameter.numel()
        trained[home] += parameter.numel() * parameter.requires_grad
    blocks = dict.fromkeys((*recorder.ran, *recorder.names.values()))  # blocks that never ran have parameters, too
    for name in (*blocks, OUTSIDE):
        block = TracedBlock(
            name=name,
            parameters=all_parameters[name],
            trained=trained[name],
            flops=recorder.flops[name],
            saved=recorder.saved(name),
            output=recorder.outputs[name],
            traffic=recorder.traffic[name],
            kernels=recorder.kernels[name],
        )
        if name or block.parameters or block.flops or block.saved:
            yield block


def _home(parameter: str, blocks: Iterable[str]) -> str:
    """The innermost block that a parameter is in."""
    return max((block for block in blocks if parameter.startswith(f"{block}.")), key=len, default=OUTSIDE)


def _per_sample(once: TracedBlock, twice: TracedBlock, num_samples: int) -> TracedBlock:
    saved = (twice.saved - once.saved) / num_samples
    return replace(
        once,
        flops=(twice.flops - once.flops) / num_samples,
        output=(twice.output - once.output) / num_samples,
        traffic=(twice.traffic - once.traffic) / num_samples,
        saved=saved,
        saved_anyway=max(0.0, once.saved - saved * num_samples),
    )
