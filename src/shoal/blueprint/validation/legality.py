"""Which plans a model can be laid out by: everything that can be said before a process starts, with the legal values.

`Plan.resolve` knows ranks. Whether the degrees fit a *model* (its heads, features, blocks, sequence and batch) torch
finds out inside a started run, one problem at a time and seldom by name. Here the same rules are pure functions of the
plan and the model's description: `check_plan` lists what is wrong, and `legal_plans` is every plan in which nothing is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

from shoal.blueprint.description import Description, Split, matches
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import CHOICES, VIRTUAL_STAGES, Plan
from shoal.blueprint.schedules.generate import check_schedule
from shoal.errors import Problem, ShoalError, listed, nearest

Shapes = Mapping[str, tuple[int, ...]]
"""Full name of a parameter → its shape on one device."""

SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")
"""Schedules that compute the gradients of activations first, and those of weights when there is time."""

_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")

SPLITS_ESSAY = """give the model a method that says how its layers may be split:
        from shoal import Description, Split
        def describe(self):
            return Description(
                before_blocks=("embedding",),
                blocks=tuple(f"blocks.{i}" for i in range(len(self.blocks))),
                after_blocks=("norm", "head"),
                splits={
                    "embedding": Split.VOCABULARY,  # split by tokens of the vocabulary
                    "blocks.*.norm": Split.SEQUENCE,  # works on each position alone
                    "blocks.*.up": Split.COLUMN,  # a linear split by output features, ...
                    "blocks.*.down": Split.ROW,  # ... and the one that reads these features
                    "norm": Split.SEQUENCE,
                    "head": Split.VOCABULARY,
                },
            )
        with the names of your own modules; `*` stands for one part of a name"""

BLOCKS_ESSAY = """give the model a method that says where it may be cut:
        from shoal import Description
        def describe(self):
            return Description(
                before_blocks=("embedding",),
                blocks=tuple(f"blocks.{i}" for i in range(len(self.blocks))),
                after_blocks=("norm", "head"),
            )
        with the names of your own modules, in the order of the forward"""

POSITIONS_ESSAY = """leave cp out, or let the model take the places of its tokens, and say by which argument:
        from shoal import Description
        def forward(self, tokens, positions=None): ...  # (batch, tokens); None: counted from 0
        def describe(self):
            return Description(positions="positions")
        with all else that the description says of your model"""

EXPERTS_ESSAY = """leave ep out, or give the model a method that says what its experts are:
        from shoal import Description, Split
        def describe(self):
            return Description(
                num_experts=8,
                active_experts=2,
                splits={"blocks.*.experts": Split.EXPERTS},
            )
        with the names of your own modules; `*` stands for one part of a name"""


def check_plan(
    plan: Plan,
    *,
    description: Description,
    batch: int | None = None,
    sequence: int | None = None,
    features: Shapes | None = None,
    modules: Collection[str] | None = None,
    is_split_by_hand: bool = False,
    compiles: bool = False,
) -> list[Problem]:
    """Why a resolved plan cannot run this model. Empty: it can.

    `batch` are the samples of a step, `sequence` the tokens per sample, `features` the shapes of all parameters and
    `modules` the names of all submodules; None: not known, not checked. `is_split_by_hand`: its author has written its
    split layers. `compiles`: torch.compile captures its blocks.
    """
    if modules is not None and (wrong := list(_misdescribed(description, modules))):
        return wrong  # whatever else would be said, would be said of this
    return [
        *(() if is_split_by_hand else _tensor_misfits(plan, description, sequence, features or {})),
        *_context_misfits(plan, description, sequence),
        *_expert_misfits(plan, description),
        *_homeless(plan, description, features or {}),
        *_without_blocks(plan, description),
        *_pipeline_misfits(plan, description),
        *(_compile_misfits(plan, description) if compiles else ()),
        *_precision_misfits(plan, description),
        *(_batch_misfits(plan, batch) if batch is not None else ()),
    ]


def legal_plans(
    world_size: int,
    *,
    description: Description,
    batch: int,
    sequence: int | None = None,
    features: Shapes | None = None,
    v: Sequence[int] = (2,),
) -> Iterator[Plan]:
    """Every legal plan of this many ranks over all six axes, from simple to composed.

    `v` are the stages per rank to try where a schedule leaves them open. No two plans do the same: zero is above 0 only
    where dp_shard x cp has someone to share with, and interleaved and looped begin at v=2, since with v=1 they are 1f1b
    and gpipe. Microbatches have one sequence, so that pipelines have as many as can be.
    """
    for plan in sorted(_all_plans(world_size, description, batch, v), key=_complexity):
        if not check_plan(plan, description=description, batch=batch, sequence=sequence, features=features):
            yield plan


# ---- what a model says of itself --------------------------------------------------------------------------------


def _misdescribed(description: Description, modules: Collection[str]) -> Iterator[Problem]:
    """Names of a description that the model does not have, has twice, or that say nothing."""
    said = {part: getattr(description, part) for part in ("before_blocks", "blocks", "after_blocks")}
    head = () if description.head is None else (description.head,)
    for part, names in {**said, "head": head}.items():
        for name in (name for name in names if name not in modules):
            near = nearest(name, modules)
            what = f"describe() names {name!r} in {part}, and the model has no such submodule"
            yield Problem(what, f"did you mean {near}?" if near else "the name that model.named_modules() gives it")
    home: dict[str, str] = {}
    for part, names in said.items():
        for name in names:
            if name in home:
                yield Problem(f"describe() names {name!r} in {home[name]} and in {part}", "leave one of them out")
            home[name] = part
    for pattern, split in description.splits.items():
        if split not in list(Split):  # a word, say
            kinds = listed([f"Split.{kind.name}" for kind in Split])
            yield Problem(f"describe() splits {pattern!r} by {split!r}", f"from shoal import Split: {kinds}")
        elif not any(matches(pattern, name) for name in modules):
            near = nearest(pattern, [_as_pattern(name) for name in modules])
            what = f"describe() says how {pattern!r} is split, and no submodule has such a name"
            yield Problem(what, f"did you mean {near}?" if near else "`*` stands for one part of a name")


# ---- tensor and sequence parallelism --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """Something that tp has to divide, or, where `uneven`, to give every rank at least one of."""

    size: int
    what: str
    uneven: bool = False

    def allows(self, tp: int) -> bool:
        # Uneven pieces are dealt as torch.chunk does: all of one size, and the last one takes what is left.
        return -(-self.size // tp) * (tp - 1) < self.size if self.uneven else self.size % tp == 0


def _tensor_misfits(plan: Plan, description: Description, sequence: int | None, features: Shapes) -> Iterator[Problem]:
    tp = plan.layout.tp
    if tp == 1:
        return
    if not description.splits:
        yield Problem(f"tp={tp} splits layers, but the model does not say how its layers may be split", SPLITS_ESSAY)
        return
    rules = [*_rules_of_heads(description), *_rules_of_features(description, features)]
    legal = [degree for degree in range(1, max(tp, 8) + 1) if all(rule.allows(degree) for rule in rules)]
    if odd := [rule.what for rule in rules if not rule.uneven and not rule.allows(tp)]:
        more = f" and {len(odd) - 3} more" if len(odd) > 3 else ""
        yield Problem(f"tp={tp} does not divide {', '.join(odd[:3])}{more}", f"tp={listed(legal)}")
    for rule in (rule for rule in rules if rule.uneven and not rule.allows(tp)):
        per_rank = -(-rule.size // tp)
        yield Problem(
            f"tp={tp} leaves no token of {rule.what} to the last rank: {per_rank} go to each", f"tp={listed(legal)}"
        )
    yield from _sequence_misfits(plan, description, sequence, legal)
    yield from _unclaimed(tp, description, features)


def _rules_of_heads(description: Description) -> Iterator[_Rule]:
    for name in ("num_heads", "num_kv_heads"):
        if (heads := getattr(description, name)) is not None:
            yield _Rule(heads, f"{name}={heads}")


def _rules_of_features(description: Description, features: Shapes) -> Iterator[_Rule]:
    """One rule for each pattern of the description and each size that it meets."""
    seen = set()
    for name, shape in features.items():
        pattern, split = _claim(name, description)
        dim = {Split.COLUMN: 0, Split.VOCABULARY: 0, Split.ROW: 1}.get(split) if split else None
        if dim is None or dim >= len(shape) or (pattern, shape[dim]) in seen:  # the bias of a row is not split
            continue
        seen.add((pattern, size := shape[dim]))
        if split is Split.VOCABULARY:
            yield _Rule(size, f"the {size} of {pattern}", uneven=True)
        else:
            yield _Rule(size, f"the {size} {'input' if dim else 'output'} features of {pattern}")


def _sequence_misfits(
    plan: Plan, description: Description, sequence: int | None, legal: Sequence[int]
) -> Iterator[Problem]:
    """Sequence parallelism gives every tp rank as many tokens. Not said, it is on where the model allows it."""
    if plan.sp and not divides_tokens(description):
        yield Problem(
            "sp=on divides tokens from an embedding in before_blocks that is split by vocabulary to a head in"
            " after_blocks that is, and the model does not describe both",
            'sp=off, or splits={"embedding": Split.VOCABULARY, "head": Split.VOCABULARY}',
        )
        return
    is_on = divides_tokens(description) if plan.sp is None else plan.sp
    tp, cp = plan.layout.tp, plan.layout.cp
    if is_on and sequence is not None and sequence % (tp * cp):
        around = sorted({max(1, sequence // (tp * cp)) * tp * cp, -(-sequence // (tp * cp)) * tp * cp})
        degrees = [degree for degree in legal if sequence % (degree * cp) == 0] or [1]
        ranks = f"tp={tp} x cp={cp}" if cp > 1 else f"tp={tp}"
        yield Problem(
            f"{ranks} does not divide the {sequence} tokens of a sequence, which sp deals to the ranks",
            f"sp=off, or --data.seq_len {listed(around)}, or tp={listed(degrees)}",
        )


def divides_tokens(description: Description) -> bool:
    """Whether sequence parallelism can be on: the tokens are divided where they are embedded, some module says that it
    works on each of them alone, and the head puts them together again."""
    embeds = any(
        split is Split.VOCABULARY and matches(pattern, name)
        for name in description.before_blocks
        for pattern, split in description.splits.items()
    )
    gathers = any(
        split in (Split.VOCABULARY, Split.COLUMN) and is_inside_any(pattern, description.after_blocks)
        for pattern, split in description.splits.items()
    )
    return embeds and gathers and Split.SEQUENCE in description.splits.values()


def is_inside_any(pattern: str, names: Sequence[str]) -> bool:
    """Whether a pattern may speak of one of these submodules, or of one inside them."""
    return any(matches(".".join(pattern.split(".")[: name.count(".") + 1]), name) for name in names)


def _unclaimed(tp: int, description: Description, features: Shapes) -> Iterator[Problem]:
    """Parameters of which the description does not say what tp does to them."""
    lost = [name for name in features if _claim(name, description)[1] is None]
    modules = list(dict.fromkeys(_as_pattern(name.rpartition(".")[0]) for name in lost))
    if loose := [name for name in lost if "." not in name]:
        what = f"tp={tp}: the model holds {', '.join(loose)} itself, and a split is said of a submodule"
        yield Problem(what, f"move {loose[0]} into a submodule of its own")
    if modules := [module for module in modules if module]:
        entries = ", ".join(f'"{module}": Split.SEQUENCE' for module in modules)
        yield Problem(
            f"tp={tp}: the model does not say how {', '.join(modules)} {'is' if len(modules) == 1 else 'are'} split",
            f"add to its description splits={{{entries}}} if each position is worked on alone,"
            " else Split.COLUMN, ROW, VOCABULARY or HEADS",
        )


def _claim(parameter: str, description: Description) -> tuple[str, Split | None]:
    """The pattern that speaks of a parameter, and what it says: that of its module, or of a module around it that works
    on each position alone."""
    module = parameter.rpartition(".")[0]
    own = [(pattern, split) for pattern, split in description.splits.items() if _matches(pattern, module)]
    around = [
        (pattern, split)
        for pattern, split in description.splits.items()
        if split in (Split.SEQUENCE, Split.EXPERTS)
        and _matches(pattern, ".".join(module.split(".")[: pattern.count(".") + 1]))
    ]
    return next(iter([*own, *around]), ("", None))


_matches = lru_cache(maxsize=2**16)(matches)
"""`legal_plans` asks the same of every plan."""


def _as_pattern(module: str) -> str:
    """blocks.3.norm → blocks.*.norm"""
    return ".".join("*" if part.isdecimal() else part for part in module.split("."))


# ---- context and expert parallelism ---------------------------------------------------------------------------------


def num_chunks(plan: Plan, cp: int | None = None) -> int:
    """Into how many equal chunks of tokens cp cuts a sequence: a ring gives two of them to each rank."""
    degree = cp or plan.layout.cp
    return degree if degree == 1 or plan.context == "ulysses" else 2 * degree


def _context_misfits(plan: Plan, description: Description, sequence: int | None) -> Iterator[Problem]:
    cp, tp, heads = plan.layout.cp, plan.layout.tp, description.num_heads
    if cp == 1:
        return
    if description.positions is None:
        what = f"cp={cp} gives each rank tokens from the middle of a sequence, but the model cannot be told from where"
        yield Problem(what, POSITIONS_ESSAY)
    chunks = num_chunks(plan)
    if sequence is not None and sequence % chunks:
        around = sorted({max(1, sequence // chunks) * chunks, -(-sequence // chunks) * chunks})
        degrees = divisors(plan.layout.world_size)
        legal = [degree for degree in degrees if sequence % num_chunks(plan, degree) == 0]
        yield Problem(
            f"cp={cp} cuts a sequence into {chunks} chunks, and its {sequence} tokens cannot be divided evenly",
            f"--data.seq_len {listed(around)}, or cp={listed(legal)}",
        )
    if plan.context == "ulysses" and heads is not None and heads % tp == 0 and heads // tp % cp:
        share = f"num_heads={heads} / tp={tp} = {heads // tp}" if tp > 1 else f"num_heads={heads}"
        legal = divisors(heads // tp)
        yield Problem(
            f"cp={cp} with ulysses deals heads to the ranks, and does not divide {share}",
            f"ring instead of ulysses, or cp={listed(legal)}",
        )


def _expert_misfits(plan: Plan, description: Description) -> Iterator[Problem]:
    layout, num_experts = plan.layout, description.num_experts
    if layout.ep == 1:
        return
    has_split = Split.EXPERTS in description.splits.values()
    if num_experts is None or not has_split:
        half = "no num_experts" if has_split else "no Split.EXPERTS in its splits" if num_experts else ""
        why = f"the model's describe() has {half}" if half else "the model says nothing of experts"
        yield Problem(f"ep={layout.ep} divides experts, but {why}", EXPERTS_ESSAY)
    elif num_experts % layout.ep:
        legal = [degree for degree in divisors(layout.dp_shard * layout.cp) if num_experts % degree == 0]
        yield Problem(f"ep={layout.ep} does not divide num_experts={num_experts}", f"ep={listed(legal)}")
    if plan.recompute == "selective":
        yield Problem(
            f"ep={layout.ep} with recompute=selective: experts are gathered inside of a block, which torch's selective"
            " checkpoint does not allow",
            "recompute=full or recompute=none",
        )


# ---- pipelines and batches ------------------------------------------------------------------------------------------


def _pipeline_misfits(plan: Plan, description: Description) -> Iterator[Problem]:
    pp, v, num_blocks = plan.layout.pp, plan.v or 1, len(description.blocks)
    if pp == 1:
        return
    if not num_blocks:
        yield Problem(f"pp={pp} cuts the model between blocks, but it does not say what its blocks are", BLOCKS_ESSAY)
        return
    if pp * v > num_blocks:
        what = f"pp={pp} x v={v} = {pp * v} stages" if v > 1 else f"pp={pp} stages"
        fixes = [f"pp={listed(range(1, num_blocks // v + 1))}"] if v <= num_blocks else []
        fixes += ["v=1 with 1f1b or gpipe"] if v > 1 and pp <= num_blocks else []
        yield Problem(
            f"{what} are more than the {num_blocks} block{'s' * (num_blocks != 1)} of the model",
            ", or ".join([*fixes, f"a model of at least {pp * v} blocks"]),
        )
    if plan.recompute != "none" and plan.schedule in SPLIT_BACKWARD:
        yield Problem(
            f"{plan.schedule} splits each backward in two, and torch then recomputes a block once for every parameter",
            "recompute=none, or 1f1b, interleaved, looped or gpipe",
        )


def _precision_misfits(plan: Plan, description: Description) -> Iterator[Problem]:
    if plan.precision != "fp8":
        return
    if plan.layout.tp > 1:
        yield Problem(
            f"fp8 computes with whole linear layers, and tp={plan.layout.tp} splits them",
            "bf16 instead of fp8, or tp=1",
        )
    if not description.blocks:
        yield Problem("fp8 is for the blocks of a model, and this one does not say what its blocks are", BLOCKS_ESSAY)


def _compile_misfits(plan: Plan, description: Description) -> Iterator[Problem]:
    if plan.schedule in SPLIT_BACKWARD:
        what = (
            f"{plan.schedule} splits each backward in two, and a block that torch.compile has captured computes all of"
        )
        yield Problem(f"{what} it each time", "without compile, or 1f1b, interleaved, looped or gpipe")
    if plan.recompute != "none" and plan.layout.pp > 1 and description.num_experts:
        yield Problem(
            f"torch.compile cannot capture recompute={plan.recompute} of blocks with experts in a pipeline, where their"
            " routers have to find the auxiliary loss of their own microbatch again",
            "without compile, or recompute=none, or pp=1",
        )


def _without_blocks(plan: Plan, description: Description) -> Iterator[Problem]:
    if plan.recompute != "none" and not description.blocks:
        what = f"recompute={plan.recompute} forgets what blocks compute, but the model does not say what its blocks are"
        yield Problem(what, BLOCKS_ESSAY)


def _homeless(plan: Plan, description: Description, features: Shapes) -> Iterator[Problem]:
    """Parameters that live nowhere: a stage, and what is split, is made of the modules that the description names."""
    tp, pp = plan.layout.tp, plan.layout.pp
    if not description.blocks or tp == pp == 1:
        return
    parts = (*description.before_blocks, *description.blocks, *description.after_blocks)
    homeless = [name for name in features if not any(name.startswith(f"{part}.") for part in parts)]
    if pp == 1:  # what no split claims has been told already
        homeless = [name for name in homeless if _claim(name, description)[1] is not None]
    if homeless:
        place = f"pp={pp}: {homeless[0]} belongs to no stage" if pp > 1 else f"tp={tp}: {homeless[0]} is left out"
        yield Problem(f"{place}, since no part of the description holds it", _home_for(homeless, description))


def _home_for(homeless: Sequence[str], description: Description) -> str:
    """Where a parameter may belong: to a block that was left out, else before or after the blocks."""
    depth = description.blocks[0].count(".") + 1
    around = dict.fromkeys(".".join(name.split(".")[:depth]) for name in homeless)
    blocks = [name for name in around if _as_pattern(name) == _as_pattern(description.blocks[0])]
    if blocks:
        return f"add {', '.join(map(repr, blocks))} to blocks"
    modules = ", ".join(dict.fromkeys(f'"{name.rpartition(".")[0] or name}"' for name in homeless))
    return f"before_blocks=({modules},) if it runs before the first block, after_blocks if after the last"


def _batch_misfits(plan: Plan, batch: int) -> list[Problem]:
    try:
        num_microbatches = plan.num_microbatches(batch)
    except ShoalError as error:
        return list(error.problems)
    if plan.schedule is None:
        return []
    return check_schedule(plan.schedule, num_ranks=plan.layout.pp, v=plan.v or 1, num_microbatches=num_microbatches)


# ---- every plan -----------------------------------------------------------------------------------------------------


def _all_plans(world_size: int, description: Description, batch: int, v: Sequence[int]) -> Iterator[Plan]:
    """Every plan of this many ranks that does something of its own, less those that this model plainly cannot have."""
    for degrees in _all_degrees(world_size, description, batch):
        pp, tp, cp, ep = (degrees[axis] for axis in ("pp", "tp", "cp", "ep"))
        shares = degrees["dp_shard"] * cp > 1
        zeros = (*((0,) if degrees["dp_shard"] == ep == 1 else ()), *((1, 2, 3) if shares else ()))
        orders = list(_orders(v)) if pp > 1 else [{}]
        contexts = CHOICES["context"] if cp > 1 else (None,)
        for zero, context, order, sp in product(zeros, contexts, orders, (False, True) if tp > 1 else (None,)):
            said = {**degrees, **order, "context": context, "zero": zero, "sp": sp, "mb": 1}
            yield Plan.of(said).resolve(world_size)


def _all_degrees(world_size: int, description: Description, batch: int) -> Iterator[dict[str, int]]:
    """Degrees that fill the world. What a look at them rules out never becomes a plan: there are thousands."""
    num_experts, heads = description.num_experts or 1, (description.num_heads or 0, description.num_kv_heads or 0)
    for dp_replicate, dp_shard, cp, tp, pp in product(divisors(world_size), repeat=5):
        degrees = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp, "pp": pp}
        is_possible = (
            prod(degrees.values()) == world_size
            and batch % (dp_replicate * dp_shard) == 0
            and (cp == 1 or description.positions is not None)
            and (tp == 1 or (bool(description.splits) and not any(number % tp for number in heads)))
            and (pp == 1 or pp <= len(description.blocks))
        )
        for ep in divisors(dp_shard * cp) if is_possible else ():
            if num_experts % ep == 0:
                yield {**degrees, "ep": ep}


def _orders(v: Sequence[int]) -> Iterator[dict[str, Any]]:
    for word in CHOICES["schedule"]:
        several = {1, *v} if word == "zb" else {stages for stages in v if stages > 1}
        for stages in sorted({VIRTUAL_STAGES[word]} if word in VIRTUAL_STAGES else several):
            yield {"schedule": word, "v": stages}


def _complexity(plan: Plan) -> tuple[Any, ...]:
    """Fewer axes first; then by which axes, and what is done on them."""
    degrees = tuple(getattr(plan, axis) for axis in _AXES)
    used = tuple(number for number, degree in enumerate(degrees) if degree > 1)
    context = CHOICES["context"].index(plan.context) if plan.context else -1
    schedule = CHOICES["schedule"].index(plan.schedule) if plan.schedule else -1
    return len(used), used, degrees, plan.zero, context, schedule, plan.v, plan.sp or False
