"""The tensor that blocks pass on: its shape, and a check that blocks pass nothing else.

A stage of a pipeline receives one tensor from the stage before it. A run on meta tensors, without memory, checks that a
model's blocks need no more: every block's output is cut off from the graph, so a later value that still depends on
something earlier has bypassed the blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shoal.errors import Problem, raise_if
from shoal.parallel.pipeline.pipeline import Call
from shoal.parallel.pipeline.skeleton import on_meta
from shoal.parallel.tensor import TensorParallel


@dataclass
class Activation:
    """The shape of the tensor between stages."""

    skeleton: nn.Module
    blocks: tuple[str, ...]
    tensor: TensorParallel
    _known: dict[tuple[torch.Size, ...], tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, call: Call) -> tuple[int, ...]:
        """Return the shape for a call of the model."""
        arguments, options = call
        key = tuple(x.shape for x in (*arguments, *options.values()) if isinstance(x, Tensor))
        if key not in self._known:
            shape = list(stream_of(self.skeleton, self.blocks, call))
            if self.tensor.splits_tokens:
                shape[-2] //= self.tensor.degree
            self._known[key] = tuple(shape)
        return self._known[key]


@torch.enable_grad()
def stream_of(model: nn.Module, blocks: Sequence[str], call: Call) -> torch.Size:
    """Return the shape of the tensor that blocks pass on, found by running a model without memory. Rejects a model
    whose blocks do not pass one tensor on unchanged."""
    taken: list[object] = []
    returned: list[object] = []
    computed: list[object] = []

    def take(_module: nn.Module, given: tuple[object, ...]) -> None:
        taken.append(given[0] if given else None)

    def cut_off(_module: nn.Module, _given: object, output: object) -> object:
        """Detach the output: later modules may depend on earlier ones through it alone."""
        computed.append(output)
        returned.append(output.detach().requires_grad_() if isinstance(output, Tensor) else output)
        return returned[-1]

    modules = [model.get_submodule(name) for name in blocks]
    hooks = [block.register_forward_pre_hook(take) for block in modules]
    hooks += [block.register_forward_hook(cut_off) for block in modules]
    arguments, options = call
    try:
        with torch.device("meta"):
            output = model(*map(on_meta, arguments), **{name: on_meta(value) for name, value in options.items()})
    finally:
        for hook in hooks:
            hook.remove()
    raise_if(_broken_chain(blocks, taken, returned) or _skips(model, blocks, computed, output))
    first = returned[0]
    assert isinstance(first, Tensor)
    return first.shape


def _skips(model: nn.Module, blocks: Sequence[str], computed: list[object], output: object) -> list[Problem]:
    """Check whether a later block, or the code after the last, reads what was computed before the first."""
    inside = {id(p) for name in blocks for p in model.get_submodule(name).parameters()}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    outside = {n: p for n, p in model.named_parameters() if id(p) not in inside and uses[id(p)] == 1}
    before = _behind(computed[0], outside)
    for name, value in zip([*blocks[1:], "what follows the blocks"], [*computed[1:], output], strict=True):
        for reached in _behind(value, before):
            what = f"{name} reads what {reached} has computed before the first block, and only the first stage has it"
            return [Problem("M044", what, "pp=1, or pass it inside the one tensor that blocks pass on")]
    return []


def _behind(value: object, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the parameters that a value depends on."""
    output = getattr(value, "logits", value)
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    if not isinstance(output, Tensor) or not output.requires_grad or not trained:
        return {}
    grads = torch.autograd.grad(output.sum(), list(trained.values()), retain_graph=True, allow_unused=True)
    return {name: p for (name, p), grad in zip(trained.items(), grads, strict=True) if grad is not None}


def _broken_chain(blocks: Sequence[str], taken: list[object], returned: list[object]) -> list[Problem]:
    """Find where the activation changes between two blocks, or its shape inside one."""
    if len(returned) != len(blocks):
        what = f"the forward runs {len(returned)} blocks, but the model's description names {len(blocks)}"
        return [Problem("M045", what, "pp=1, or in blocks=(...) exactly the modules that run one by one, each once")]
    for name, following, output, given in zip(blocks, blocks[1:], returned, taken[1:], strict=False):
        if not isinstance(output, Tensor) or output is not given:
            what = "is not a tensor" if not isinstance(output, Tensor) else f"is not what {following} takes"
            fix = "let each block return the tensor that the next one takes as its first argument, with the residual"
            return [
                Problem(
                    "M041",
                    f"what {name} returns {what}: the forward changes it between the blocks, where no stage is",
                    f"{fix} (x + ...) added inside the block",
                )
            ]
    shapes = {
        name: tuple(output.shape) for name, output in zip(blocks, returned, strict=True) if isinstance(output, Tensor)
    }
    odd = next((name for name, shape in shapes.items() if shape != shapes[blocks[0]]), None)
    if odd is not None:
        what = f"{blocks[0]} returns {list(shapes[blocks[0]])} and {odd} {list(shapes[odd])}"
        return [Problem("M043", f"a pipeline sends one shape between stages, but {what}", "pp=1 for this model")]
    return []
