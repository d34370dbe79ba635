"""Which submodules FSDP2 gathers as one, where not the blocks of a description: by class, or by size.

wrap_classes=("Block",)     root: embed, norm, head      Block 0      Block 1      ...
wrap_min_params=1_000_000   the smallest submodules that have this many parameters outside of smaller ones
neither, and no blocks      by size, a sixteenth of the model
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from shoal.blueprint.plan import Plan
from shoal.errors import Problem, listed, nearest
from shoal.parallel.data.shard_policy import DEFAULT_SHARDING, ShardPolicy

DEFAULT_UNITS = 16
"""Approximate number of units of a model without a description."""


def chosen_units(
    model: nn.Module, policy: ShardPolicy, *, has_blocks: bool, except_for: Iterable[nn.Module] = ()
) -> tuple[str, ...] | None:
    """Return the names of the units beside the root, children before parents; None: the description says them."""
    if policy.wrap_classes:
        done = set(except_for)
        named = ((name, module) for name, module in model.named_modules() if module not in done)
        wrapped = {module: name for name, module in named if name and _kind(module) in policy.wrap_classes}
    elif policy.wrap_min_params is None and has_blocks:
        return None
    else:
        names = {module: name for name, module in model.named_modules()}
        wrapped = {module: names[module] for module in units_by_size(model, except_for, policy.wrap_min_params)}
    return tuple(wrapped[module] for module in in_order(model) if module in wrapped)


def in_order(module: nn.Module) -> Iterator[nn.Module]:
    """Yield all submodules and the module itself once, as a forward finishes them: children before parents."""
    seen: set[nn.Module] = set()

    def visit(inner: nn.Module) -> Iterator[nn.Module]:
        if inner not in seen:
            seen.add(inner)
            for child in inner.children():
                yield from visit(child)
            yield inner

    return visit(module)


def units_by_size(
    model: nn.Module, except_for: Iterable[nn.Module] = (), enough: int | None = None
) -> Sequence[nn.Module]:
    """Return the smallest submodules with at least this many parameters not yet in a unit, children before parents.

    except_for  units already
    enough      None: a sixteenth of the parameters of the model
    """
    if enough is None:
        enough = max(1, sum(parameter.numel() for parameter in model.parameters()) // DEFAULT_UNITS)
    done = list(except_for)
    taken = {parameter for module in done for parameter in module.parameters()}
    shared = _shared(model)
    units: list[nn.Module] = []
    hidden = _hidden(model)
    for module in reversed(list(model.modules())[1:]):  # `modules` lists parents before children
        if module in hidden or module in done:
            continue
        if shared.intersection(module.parameters()):
            continue  # shared parameters can only be in the unit that holds all their users: the full model
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        if _has_forward(module) and sum(parameter.numel() for parameter in own) >= enough:
            units.append(module)
            taken.update(own)
    return units


def check_units(
    model: nn.Module, plan: Plan, policy: ShardPolicy, *, blocks: Sequence[str], experts: Sequence[str], compiles: bool
) -> Iterator[Problem]:
    """Find settings of units that do not fit a model or a plan with a layout. `experts`: those that `ep` divides."""
    yield from _without_effect(plan, policy)
    modules = dict(model.named_modules())
    kinds = {_kind(module) for module in modules.values()}
    for kind in policy.wrap_classes:
        if kind not in kinds:
            what = f"wrap_classes must name classes of modules of {_kind(model)}, got {kind!r}"
            near = nearest(kind, kinds)
            yield Problem("M148", what, f"wrap_classes {near}" if near else f"one of {listed(sorted(kinds))}")
    hidden, users = _hidden(model), _users(model)
    for name, module in modules.items() if policy.wrap_classes else ():
        is_wrapped = name and _kind(module) in policy.wrap_classes
        if is_wrapped and (why := _why_no_unit(name, module, hidden, users)):
            what = f"wrap_classes {_kind(module)} cannot make a unit of {name}: {why}"
            yield Problem("M149", what, "the class of a module around it")
            break
    inner = [name for name in chosen_units(model, policy, has_blocks=True) or () if _is_below(name, blocks)]
    if compiles and inner:
        what = f"compile makes one graph of a block, and {_said(policy)} gathers {inner[0]} inside of it"
        yield Problem("P073", what, "compile=False, or the class of the block in wrap_classes")
    inner += [name for name in experts if _is_below(name, blocks)]
    if policy.forward_prefetch is not None and plan.recompute != "none" and plan.is_sharded and inner:
        yield Problem(
            "P075",
            f"recompute={plan.recompute} runs the forward of {inner[0]} again, where"
            f" forward_prefetch={policy.forward_prefetch} would gather units that are done",
            "recompute=none in the plan, units that are blocks, or no forward_prefetch",
        )


def _without_effect(plan: Plan, policy: ShardPolicy) -> Iterator[Problem]:
    """Find settings that the plan never reads. One rank, and one that `zero` leaves alone, accept those for several."""
    changed = [
        name for name in ShardPolicy.__dataclass_fields__ if getattr(policy, name) != getattr(DEFAULT_SHARDING, name)
    ]
    if not changed or plan.layout.world_size == 1:
        return
    if not plan.zero:
        what = f"{' and '.join(changed)} {_has(changed)} no effect without zero=1 to zero=3"
        fix = "zero=3 in the plan" + (", or compress=bf16" if changed == ["reduce_dtype"] else "")
        yield Problem("P074", what, f"{fix}; or leave it out")
    if not plan.is_sharded:
        return
    prefetches = [name for name in changed if name.endswith("prefetch")]
    if prefetches and plan.layout.pp > 1:
        yield Problem(
            "P074",
            f"{' and '.join(prefetches)} {_has(prefetches)} no effect under pp={plan.layout.pp}, where a stage stays"
            " gathered for a step",
            "pp=1 in the plan; or leave it out",
        )
    elif policy.backward_prefetch is not None and plan.zero != 3:
        what = f"backward_prefetch has no effect under zero={plan.zero}, which keeps parameters for the backward"
        yield Problem("P074", what, "zero=3 in the plan; or leave it out")


def _why_no_unit(name: str, module: nn.Module, hidden: set[nn.Module], users: Counter[nn.Parameter]) -> str | None:
    """Why FSDP2 cannot gather a module by itself; None: it can."""
    if not _has_forward(module):
        return "it has no forward of its own"
    if module in hidden:
        return "torch's attention reads its weights without calling it"
    inside = _users(module)
    shared = next((own for own, parameter in module.named_parameters() if users[parameter] > inside[parameter]), None)
    return None if shared is None else f"{name}.{shared} is shared with a module outside of it"


def _users(model: nn.Module) -> Counter[nn.Parameter]:
    """Parameter → how many names it has."""
    return Counter(parameter for _, parameter in model.named_parameters(remove_duplicate=False))


def _shared(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that have more than one name."""
    return {parameter for parameter, number in _users(model).items() if number > 1}


def _hidden(model: nn.Module) -> set[nn.Module]:
    """torch's own attention reads the weights of its layers without calling them, so nothing would gather those."""
    attentions = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    return {inner for module in attentions for inner in module.children()}


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)


def _is_below(name: str, blocks: Sequence[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _said(policy: ShardPolicy) -> str:
    if policy.wrap_classes:
        return f"wrap_classes {listed(policy.wrap_classes)}"
    return f"wrap_min_params {policy.wrap_min_params:,}"


def _has(names: Sequence[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _kind(module: nn.Module) -> str:
    return type(module).__name__
