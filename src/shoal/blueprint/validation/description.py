"""Checks of a model's description: names that the model lacks, and parameters that no part holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from shoal.blueprint.description import Description, Split, matches
from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.description_to_paste import as_code
from shoal.errors import Problem, listed, nearest

Shapes = Mapping[str, tuple[int, ...]]
"""Full name of a parameter → its shape on one device."""

BLOCKS_ESSAY = """give the model a method that lists its blocks:
        from shoal import Description
        def describe(self):
            return Description(
                before_blocks=("embedding",),
                blocks=tuple(f"blocks.{i}" for i in range(len(self.blocks))),
                after_blocks=("norm", "head"),
            )
        with the names of your own modules, in the order of the forward"""


def check_names(description: Description, modules: Collection[str]) -> Iterator[Problem]:
    """Names of a description that the model lacks, that occur twice, or that match nothing."""
    named = {part: getattr(description, part) for part in ("before_blocks", "blocks", "after_blocks")}
    head = () if description.head is None else (description.head,)
    for part, names in {**named, "head": head, "costs": tuple(description.costs)}.items():
        for name in (name for name in names if name not in modules):
            near = nearest(name, modules)
            what = f"describe() names {name!r} in {part}, but the model has no such submodule"
            yield Problem("M013", what, f"{near!r} in its place" if near else "a name from dict(model.named_modules())")
    home: dict[str, str] = {}
    for part, names in named.items():
        for name in names:
            if name in home:
                what = f"describe() names {name!r} in {home[name]} and in {part}"
                yield Problem("M014", what, f"remove {name!r} from {part}")
            home[name] = part
    for pattern in (*description.parts, *description.per_rank):
        if not any(matches(pattern, name) for name in modules):
            what = f"describe() names {pattern!r} in parts or per_rank, but no submodule has such a name"
            yield Problem("M013", what, "a name from dict(model.named_modules())")
    for pattern, split in description.splits.items():
        if split not in list(Split):  # for example a string
            kinds = listed([f"Split.{kind.name}" for kind in Split])
            yield Problem("M015", f"describe() must split {pattern!r} by a Split, got {split!r}", kinds)
        elif not any(matches(pattern, name) for name in modules):
            near = nearest(pattern, [as_pattern(name) for name in modules])
            what = f"describe() splits {pattern!r}, but no submodule has such a name"
            other = "a pattern such as 'blocks.*.norm', in which `*` stands for one part of a name"
            yield Problem("M013", what, f"{near!r} in its place" if near else other)


def impossible_axes(plan: Plan, description: Description, *, is_split_by_hand: bool) -> list[str]:
    """Axes of a plan along which a derived description says that the model cannot be divided.

    The plan may be one that has no layout.
    """
    is_on = {axis: (getattr(plan, axis) or 1) > 1 for axis in ("tp", "pp", "cp", "ep")}
    is_on["sp"] = is_on["tp"] and bool(plan.sp)
    if is_split_by_hand:
        is_on["tp"] = is_on["sp"] = False  # its author knows better
    return [axis for axis in description.why_not if is_on[axis]]


def check_reasons(plan: Plan, description: Description, axes: Sequence[str], features: Shapes) -> Iterator[Problem]:
    """A problem for each of the impossible axes, with the reason of the description; the first has what is known of
    the model, as code to complete."""
    names = (*features, *(name for pair in description.tied for name in pair))
    layers = dict.fromkeys(as_pattern(name.rpartition(".")[0]) for name in names if "." in name)
    unknown = () if description.splits else [layer for layer in layers if "tp" in axes]
    own = f""", or complete this description of the model:
        {as_code(description, unknown)}"""
    for axis in axes:
        what = f"{'on' if axis == 'sp' else getattr(plan, axis)} cannot divide this model: {description.why_not[axis]}"
        if axis == "sp":
            yield Problem("P065", f"sp={what}", "sp=off")
            continue
        yield Problem("P065", f"{axis}={what}", f"{axis}=1{own}")
        own = ", or a description of your own, as above"


def check_blocks(plan: Plan, description: Description) -> Iterator[Problem]:
    """The problem of recompute without blocks."""
    if plan.recompute != "none" and not description.blocks:
        yield Problem("P041", f"recompute={plan.recompute} needs blocks, but the model describes none", BLOCKS_ESSAY)


def check_coverage(plan: Plan, description: Description, features: Shapes) -> Iterator[Problem]:
    """Parameters outside of every module that the description names. Stages and splits are made of those modules."""
    tp, pp = plan.layout.tp, plan.layout.pp
    if not description.blocks or tp == pp == 1:
        return
    parts = (*description.before_blocks, *description.blocks, *description.after_blocks)
    uncovered = [name for name in features if not any(name.startswith(f"{part}.") for part in parts)]
    if pp == 1:  # check_tensor reports those without a split
        uncovered = [name for name in uncovered if split_of_parameter(name, description)[1] is not None]
    if uncovered:
        degree = f"pp={pp}" if pp > 1 else f"tp={tp}"
        what = f"{degree}: {uncovered[0]} is in no part of the description (before_blocks, blocks, after_blocks)"
        yield Problem("M016", what, _where_to_add(uncovered, description))


def _where_to_add(uncovered: Sequence[str], description: Description) -> str:
    """The entry that a description lacks: a block, else a module before or after the blocks."""
    depth = description.blocks[0].count(".") + 1
    around = dict.fromkeys(".".join(name.split(".")[:depth]) for name in uncovered)
    blocks = [name for name in around if as_pattern(name) == as_pattern(description.blocks[0])]
    if blocks:
        return f"add {', '.join(map(repr, blocks))} to blocks"
    modules = ", ".join(dict.fromkeys(f'"{name.rpartition(".")[0] or name}"' for name in uncovered))
    return f"before_blocks=({modules},) if it runs before the first block, after_blocks if after the last"


def split_of_parameter(parameter: str, description: Description) -> tuple[str, Split | None]:
    """The pattern that matches a parameter, and its split.

    It is that of the parameter's module, or of an outer module that works on each position alone.
    """
    module = parameter.rpartition(".")[0]
    own = [(pattern, split) for pattern, split in description.splits.items() if _matches(pattern, module)]
    around = [
        (pattern, split)
        for pattern, split in description.splits.items()
        if split in (Split.SEQUENCE, Split.ALL_TOKENS, Split.EXPERTS)
        and _matches(pattern, ".".join(module.split(".")[: pattern.count(".") + 1]))
    ]
    return next(iter([*own, *around]), ("", None))


_matches = lru_cache(maxsize=2**16)(matches)
"""`legal_plans` matches the same names for every plan."""


def as_pattern(module: str) -> str:
    """blocks.3.norm → blocks.*.norm"""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))
