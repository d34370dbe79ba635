"""Trace the shapes of a model: one forward on meta tensors yields everything that predictions need of it.

Hooks record the events of the forward in order. `_is_repeated` reads from that order what a recomputed block would
execute again:

    enter ─ attention ─ saved ─ leave ─ end of the block
    └── again ──────────────┘  └── not again: a recomputation stops at the last tensor that it has to save
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from shoal.blueprint.description import Description, Split, chains
from shoal.blueprint.model_shapes import AttentionSite, DispatchSite, ModelShapes, RouterSite, TPBoundary
from shoal.blueprint.placement import is_inside, split_of
from shoal.parallel.context.attention import Attention
from shoal.parallel.data.fsdp_units import chosen_units
from shoal.parallel.data.shard_policy import DEFAULT_SHARDING, ShardPolicy
from shoal.parallel.expert.experts import Dispatch, Experts, experts_in
from shoal.parallel.expert.router import Router, Routing
from shoal.parallel.pipeline.calls import trace_calls
from shoal.parallel.pipeline.known_values import KnownValues
from shoal.parallel.pipeline.skeleton import Call, skeleton_of
from shoal.parallel.pipeline.stage_io import live
from shoal.parallel.tensor_parts.arguments import by_name, first_of, names_of


def trace_shapes(
    model: nn.Module, description: Description, call: Call, shard: ShardPolicy = DEFAULT_SHARDING
) -> ModelShapes:
    """Run a model once on meta tensors; return its shapes for predictions. The model itself may be on the meta device.

    `call` has the positional and keyword arguments of the model for some samples, samples first. `shard` decides the
    units that are gathered.
    """
    skeleton = skeleton_of(model)
    trace = _trace(skeleton, description, call)
    seconds = {second for _, second in description.tied}
    named = {name: parameter for name, parameter in skeleton.named_parameters() if name not in seconds}
    has_blocks = bool(description.blocks)
    experts = experts_in(skeleton).values()
    return ModelShapes(
        description=description,
        parameters={name: tuple(parameter.shape) for name, parameter in named.items()},
        frozen=frozenset(name for name, parameter in named.items() if not parameter.requires_grad),
        lookups=frozenset(_lookups(skeleton)),
        stream=trace.stream,
        crossings=_crossings(skeleton_of(model), description, call, trace.stream),
        tp_boundaries=tuple(trace.tp_boundaries()),
        attentions=tuple(trace.attentions()),
        dispatches=tuple(trace.dispatches()),
        routers=tuple(trace.routers()),
        units=chosen_units(skeleton, shard, has_blocks=has_blocks),
        units_beside_experts=chosen_units(skeleton, shard, has_blocks=has_blocks, except_for=experts),
        prefetched=shard.backward_prefetch or 1,
    )


def _crossings(
    model: nn.Module, description: Description, call: Call, stream: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The elements that enter each block together with all that passes by it; none, if that is `stream` everywhere."""
    if len(description.blocks) < 2:
        return ()
    forward, num_samples = trace_calls(model, description, call), _num_samples(call)
    found = []
    for start in range(len(description.blocks)):
        shapes = [forward.leaf(source).shape for source in live(forward, start)]
        per_sample = sum(prod(shape[1:]) for shape in shapes if shape[:1] == (num_samples,))
        found.append((per_sample, sum(prod(shape) for shape in shapes if shape[:1] != (num_samples,))))
    is_plain = all(one == (prod(stream), 0) for one in found[1:]) and bool(stream)
    return () if is_plain else tuple(found)


def _lookups(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            yield f"{name}.weight"


@dataclass(frozen=True, slots=True)
class _Event:
    """An event of a forward: a TP boundary, the start of an attention, of experts or of a router, a tensor saved for
    the backward, or the end of a block."""

    what: str
    module: str = ""
    shape: tuple[int, ...] = ()
    has_backward: bool = False
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Trace:
    """The events of one forward, in order."""

    description: Description
    num_samples: int
    seen: list[_Event] = field(default_factory=list)
    stream: tuple[int, ...] = ()
    deep: set[str] = field(default_factory=set)
    """Regions with layers that read what others inside of them compute."""
    _entered: Tensor | None = None
    """The input of the current split region's layers; it enters once for all of them."""

    def before_layer(self, name: str, x: Tensor) -> None:
        how = split_of(self.description, name)
        if is_inside(name, self.deep):
            return  # the input of the region has entered
        if how in (Split.COLUMN, Split.VOCABULARY) and x.is_floating_point() and x is not self._entered:
            self._entered = x
            is_whole = "enter" in self.description.sp_arguments_of(name).values()
            self._cross("enter_whole" if is_whole else "enter", name, x)

    def before_deep(self, name: str, x: Tensor) -> None:
        self._cross("enter", name, x)

    def argument(self, way: str, name: str, x: Any) -> None:
        """Something that `sp` gathers, divides or shares before a module."""
        if isinstance(x, Tensor):
            self._cross(way, name, x)

    def after_blocks(self, name: str, output: Any) -> None:
        self._cross("join", name, output if isinstance(output, Tensor) else output[0])

    def after_layer(self, name: str, output: Tensor, *, is_lookup: bool) -> None:
        how = split_of(self.description, name)
        if how is Split.ROW or (how is Split.VOCABULARY and is_lookup):
            self._entered = None
            self._cross("leave", name, output)
        elif how is Split.VOCABULARY:
            self._entered = None
            self._cross("logits", name, output)

    def before_attention(self, name: str, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor) -> None:
        facts = {"queries": tuple(q_BNTH.shape[1:]), "keys": tuple(k_BKTH.shape[1:])}
        has_backward = any(x.requires_grad for x in (q_BNTH, k_BKTH, v_BKTH))
        self.seen.append(_Event("attention", name, has_backward=has_backward, facts=facts))

    def before_experts(self, name: str, experts: Any, x_TD: Tensor, routing: Routing) -> None:
        is_trained = x_TD.requires_grad or any(weight.requires_grad for weight in experts.parameters())
        facts = {
            "num_experts": experts.num_experts,
            "rows": routing.token_R.shape[0] // self.num_samples,
            "dim": x_TD.shape[1],
            "is_predicted": routing.top_k is not None,
            "num_returns": x_TD.requires_grad + is_trained,
        }
        self.seen.append(_Event("experts", name, facts=facts))

    def before_router(self, name: str, router: Router) -> None:
        chooses = router.choice == "token"
        facts = {
            "num_experts": router.num_experts,
            "has_auxiliary": chooses and router.auxiliary_coefficient > 0,
            "gathers_scores": not chooses or router.capacity_factor is not None,
        }
        self.seen.append(_Event("router", name, facts=facts))

    def after(self, name: str) -> None:
        self.seen.append(_Event("after", name))

    def after_block(self, name: str, output: Any) -> None:
        self.seen.append(_Event("end", name))
        if isinstance(output, Tensor):
            self.stream = tuple(output.shape[1:])

    def saved(self, tensor: Tensor) -> Tensor:
        self.seen.append(_Event("saved"))
        return tensor

    def aux_loss_attached(self, y: Tensor, *facts: Any) -> Tensor:
        """Replace `Router.attach_aux_loss`, which saves the loads for the backward in a run."""
        return self.saved(y)

    def _cross(self, way: str, name: str, x: Tensor) -> None:
        rows, *rest = x.shape  # samples; or, of a model that flattens them, samples times tokens
        per_sample = (rows // self.num_samples, *rest) if rows > self.num_samples else tuple(rest)
        self.seen.append(_Event(way, name, per_sample, x.requires_grad))

    def tp_boundaries(self) -> Iterator[TPBoundary]:
        for place, event in self._of("enter", "enter_whole", "share", "leave", "logits", "gather", "divide", "join"):
            way: Any = event.what
            yield TPBoundary(
                module=event.module,
                way=way,
                shape=event.shape,
                has_backward=event.has_backward,
                is_repeated=self._is_repeated(place),
            )

    def attentions(self) -> Iterator[AttentionSite]:
        for place, event in self._of("attention"):
            end = next(i for i, later in self._of("after") if i > place and later.module == event.module)
            yield AttentionSite(
                module=event.module,
                has_backward=event.has_backward,
                is_repeated=self._is_repeated(place),
                is_output_repeated=self._is_repeated(end),
                **event.facts,
            )

    def dispatches(self) -> Iterator[DispatchSite]:
        for place, event in self._of("experts"):
            yield DispatchSite(module=event.module, is_repeated=self._is_repeated(place), **event.facts)

    def routers(self) -> Iterator[RouterSite]:
        for place, event in self._of("router"):
            yield RouterSite(module=event.module, is_repeated=self._is_repeated(place), **event.facts)

    def _of(self, *events: str) -> Iterator[tuple[int, _Event]]:
        return ((place, event) for place, event in enumerate(self.seen) if event.what in events)

    def _is_repeated(self, place: int) -> bool:
        """Whether a recomputed block would execute it again: the recomputation stops at the last tensor to save."""
        return any(later.what == "saved" for later in _until_end(iter(self.seen[place:])))


def _until_end(events: Iterator[_Event]) -> Iterator[_Event]:
    for event in events:
        if event.what == "end":
            return
        yield event


def _trace(model: nn.Module, description: Description, call: Call) -> _Trace:
    """Run a model on meta tensors and record its events."""
    trace = _Trace(description, _num_samples(call))
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for name, module in modules.items():
            is_layer = next(module.children(), None) is None
            if is_layer and split_of(description, name) in (Split.COLUMN, Split.ROW, Split.VOCABULARY):
                stack.callback(module.register_forward_pre_hook(_before(trace, name)).remove)
                stack.callback(module.register_forward_hook(_after(trace, name)).remove)
            if ways := _ways(description, module, name):
                hook = module.register_forward_pre_hook(_passes(trace, name, module, ways), with_kwargs=True)
                stack.callback(hook.remove)
            if split_of(description, name) is Split.REGION and _is_deep(description, module, name):
                trace.deep.add(name)
                hook = module.register_forward_pre_hook(_reads(trace.before_deep, name), with_kwargs=True)
                stack.callback(hook.remove)
            if isinstance(module, Router):
                module.attach_aux_loss = trace.aux_loss_attached
            if isinstance(module, Attention | Experts | Dispatch | Router):
                stack.callback(module.register_forward_pre_hook(_begun(trace, name, modules)).remove)
                stack.callback(module.register_forward_hook(_done(trace, name)).remove)
        for chain in chains(description.token_blocks):
            stack.callback(modules[chain[-1]].register_forward_hook(_joined(trace, chain[-1])).remove)
        for name in description.blocks:
            stack.callback(modules[name].register_forward_hook(_ended(trace, name)).remove)
        stack.enter_context(saved_tensors_hooks(trace.saved, lambda tensor: tensor))
        stack.enter_context(torch.enable_grad())
        known = KnownValues()
        arguments, options = tree_map_only(Tensor, known.input_of(None), call)
        stack.enter_context(torch.device("meta"))
        stack.enter_context(known)
        model(*arguments, **options)
    return trace


def _before(trace: _Trace, name: str) -> Any:
    return lambda module, arguments: trace.before_layer(name, arguments[0])


def _is_deep(description: Description, module: nn.Module, name: str) -> bool:
    return any(split_of(description, inner) is Split.LATENT for inner, _ in module.named_modules(prefix=name))


def _reads(note: Any, name: str) -> Any:
    """A hook that notes the first argument of a module, or its `hidden_states`."""

    def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        note(name, arguments[0] if arguments else options["hidden_states"])

    return hook


FIRST = ""
"""The argument with the activations, whatever its name is."""


def _ways(description: Description, module: nn.Module, name: str) -> dict[str, str]:
    """Argument → how it crosses into a module under `sp`."""
    found = dict(description.sp_arguments_of(name))
    if split_of(description, name) is Split.ALL_TOKENS:
        return {FIRST: "gather"} | {one: "share" if way == "enter" else way for one, way in found.items()}
    if name not in description.token_blocks:
        return {}
    return ({FIRST: "divide"} if name in {chain[0] for chain in chains(description.token_blocks)} else {}) | found


def _passes(trace: _Trace, name: str, module: nn.Module, ways: dict[str, str]) -> Any:
    """A hook that notes arguments of a module."""
    names = names_of(module)

    def hook(_module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        given = by_name(names, arguments, options)
        for one, way in ways.items():
            trace.argument(way, name, given.get(one or first_of(names, arguments)))

    return hook


def _after(trace: _Trace, name: str) -> Any:
    return lambda module, arguments, output: trace.after_layer(name, output, is_lookup=isinstance(module, nn.Embedding))


def _begun(trace: _Trace, name: str, modules: dict[str, nn.Module]) -> Any:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, Attention):
            trace.before_attention(name, *arguments[:3])
        elif isinstance(module, Experts):
            trace.before_experts(name, module, *arguments)
        elif isinstance(module, Dispatch):
            around = name.rpartition(".")[0]
            trace.before_experts(around, modules[around], *arguments[:2])
        elif isinstance(module, Router):
            trace.before_router(name, module)

    return hook


def _done(trace: _Trace, name: str) -> Any:
    return lambda module, arguments, output: trace.after(name)


def _ended(trace: _Trace, name: str) -> Any:
    return lambda module, arguments, output: trace.after_block(name, output)


def _joined(trace: _Trace, name: str) -> Any:
    return lambda module, arguments, output: trace.after_blocks(name, output)


def _num_samples(call: Call) -> int:
    arguments, options = call
    return next((x.shape[0] for x in (*arguments, *options.values()) if isinstance(x, Tensor) and x.dim()), 1)
