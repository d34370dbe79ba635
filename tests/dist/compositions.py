"""Which compositions of parallelisms are proven: the plans that tests train and compare with one process, by number of
ranks. The tables in docs/compositions.md are made from these lists.

LAYOUTS    tests/dist/test_layouts.py, a dense model
PLANS      tests/dist/test_compositions.py, each with the model that it is tried with
COMPILED   tests/dist/test_compiled.py, with their blocks compiled

`make test` runs those of `in_short()`, `make test-all` runs all.

llama      dense
packed     dense, several documents in a sample
moe        softmax router, auxiliary loss and z-loss, one dense layer first
bias       sigmoid router, shared expert, balanced by a bias
capacity   a router that drops
choice     experts that choose their tokens
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from shoal.blueprint.plan import Plan
from tests.cover import covering

LAYOUTS = {  # kv=4: so many heads for keys and values
    1: ["mb=2"],
    2: [
        *("dp_replicate=2 mb=2", "zero=1 mb=2", "zero=3 mb=2", "zero=2 offload=optimizer"),
        *("tp=2 sp=off mb=2", "tp=2 sp=on mb=2", "tp=2 recompute=full mb=4", "tp=2 recompute=selective mb=4"),
        *("pp=2 1f1b mb=1", "pp=2 zbv mb=2", "pp=2 1f1b mb=2 recompute=full", "pp=2 looped mb=2", "pp=2 1f1b mb=8"),
    ],
    4: [
        *("dp_replicate=2 zero=1 mb=2", "dp_replicate=2 zero=2 mb=1", "tp=2 dp_replicate=2 mb=2", "tp=4 mb=4 kv=4"),
        *("tp=2 pp=2 zero=1 1f1b mb=2", "pp=2 zero=3 1f1b mb=1", "pp=2 zero=2 zbv mb=1", "pp=2 dp_replicate=2 zb mb=1"),
        *("pp=2 tp=2 dualpipev mb=2 sp=off", "pp=2 dp_replicate=2 gpipe mb=2"),
        *("pp=2 zero=1 interleaved mb=1", "pp=2 zero=3 looped mb=2"),
    ],
    3: ["pp=3 zb mb=1"],
    6: ["pp=3 tp=2 gpipe mb=2"],
    8: ["dp_replicate=2 tp=2 sp=off zero=3 mb=2", "pp=4 dp_replicate=2 1f1b mb=1"],
}

PLANS: dict[int, list[tuple[str, str]]] = {
    1: [("mb=2", "moe"), ("mb=2 recompute=full", "bias"), ("mb=2", "packed")],
    2: [
        ("cp=2 mb=2", "llama"),
        ("cp=2 ulysses mb=2", "packed"),
        ("cp=2 mb=2", "capacity"),
        ("cp=2 ulysses mb=2", "choice"),
        ("ep=2 zero=2 mb=2", "bias"),
        ("ep=2 zero=3 mb=2 recompute=full", "moe"),
        ("ep=2 zero=3 mb=4", "capacity"),
        ("ep=2 zero=3 mb=4", "choice"),
        ("tp=2 mb=2", "moe"),
        ("tp=2 mb=2", "capacity"),
        ("dp_replicate=2 mb=2", "moe"),
        ("zero=3 mb=2", "bias"),
        ("pp=2 1f1b mb=2", "moe"),
    ],
    4: [
        ("cp=4 mb=2", "packed"),
        ("cp=4 ulysses mb=2", "llama"),
        ("cp=2 pp=2 zbv mb=2", "llama"),
        ("cp=2 pp=2 zero=2 zb mb=2", "moe"),
        ("ep=4 zero=2 mb=2", "bias"),
        ("ep=2 tp=2 sp=off zero=1 mb=2", "bias"),
        ("ep=2 pp=2 zero=1 1f1b mb=1", "moe"),
        ("ep=2 pp=2 zero=3 dualpipev mb=1", "bias"),
        ("ep=2 pp=2 zero=2 looped mb=2", "moe"),
        ("pp=2 tp=2 zb mb=2", "moe"),
        # Pairs that no plan above has: see tests/dist/table.py.
        ("cp=2 ulysses pp=2 gpipe ep=2 zero=1 recompute=full mb=2", "moe"),
        ("cp=2 ulysses tp=2 sp=off zero=2 recompute=selective mb=4", "packed"),
        ("cp=2 pp=2 interleaved ep=2 zero=2 recompute=full mb=2", "moe"),
        ("cp=2 pp=2 looped zero=1 recompute=selective mb=2", "packed"),
        ("cp=2 pp=2 gpipe zero=3 recompute=selective mb=2", "moe"),
        ("cp=2 ulysses pp=2 zb ep=2 zero=3 mb=2", "bias"),
        ("cp=2 ulysses pp=2 interleaved zero=3 mb=2", "llama"),
        ("tp=2 sp=off pp=2 looped recompute=full mb=2", "moe"),
        ("tp=2 sp=off pp=2 interleaved mb=2", "bias"),
        ("dp_replicate=2 pp=2 interleaved recompute=selective mb=1", "llama"),
        ("tp=2 sp=off pp=2 1f1b recompute=selective mb=2", "packed"),
        ("cp=2 pp=2 dualpipev zero=1 mb=2", "llama"),
        ("cp=2 ulysses pp=2 dualpipev zero=2 mb=2", "packed"),
        ("dp_replicate=2 pp=2 looped recompute=full mb=1", "moe"),
        ("tp=2 sp=off pp=2 gpipe mb=2", "capacity"),
        ("tp=2 sp=off pp=2 zb mb=2", "bias"),
        ("tp=2 pp=2 interleaved mb=2", "moe"),
        ("tp=2 pp=2 dualpipev mb=2", "choice"),
        ("cp=2 ulysses pp=2 1f1b zero=2 mb=2", "capacity"),
        ("cp=2 ulysses pp=2 zbv zero=3 mb=2", "llama"),
        ("cp=2 pp=2 zb zero=1 mb=2", "packed"),
        ("cp=2 pp=2 gpipe zero=2 mb=2", "bias"),
        ("dp_replicate=2 pp=2 dualpipev mb=1", "bias"),
        ("dp_replicate=2 cp=2 ulysses mb=2", "packed"),
        ("dp_replicate=2 ep=2 zero=3 mb=2", "bias"),
    ],
    8: [
        ("cp=2 tp=2 sp=off pp=2 1f1b mb=2", "packed"),
        ("dp_shard=2 cp=2 tp=2 zero=3 mb=2 ep=2", "moe"),
        ("dp_shard=2 tp=2 pp=2 ep=2 zero=1 zbv mb=1", "moe"),
        ("dp_replicate=2 dp_shard=2 cp=2 ep=4 zero=3 mb=1", "bias"),
        ("cp=2 ulysses tp=2 pp=2 looped zero=2 mb=2", "packed"),
        ("dp_replicate=2 tp=2 sp=off pp=2 zbv mb=1", "moe"),
    ],
}

COMPILED = [
    (1, "mb=4 recompute=full", "moe"),
    (2, "tp=2", "llama"),
    (2, "dp_replicate=2", "llama"),
    (2, "pp=2 gpipe mb=2", "llama"),
    (2, "pp=2 1f1b mb=2", "llama"),
    (2, "cp=2 ulysses zero=2", "llama"),
    (2, "ep=2 zero=3 mb=2", "bias"),
    (2, "cp=2 zero=1 recompute=selective mb=4", "packed"),
    (2, "pp=2 interleaved mb=2", "llama"),
    (4, "tp=2 sp=off pp=2 looped mb=2", "llama"),
]

ROUTED = ("moe", "bias", "capacity", "choice")
"""Models with experts."""

AXES = {
    **{f"`zero={stage}`": "zero" for stage in (1, 2, 3)},
    **dict.fromkeys(("`ring`", "`ulysses`"), "cp"),
    **dict.fromkeys(("`sp=off`", "`sp=on`"), "tp"),
    **dict.fromkeys(("`gpipe`", "`1f1b`", "`interleaved`", "`looped`", "`zb`", "`zbv`", "`dualpipev`"), "pp"),
    **dict.fromkeys(("`full`", "`selective`"), "recompute"),
}
"""Words of which a plan has one. The others are axes themselves."""


def axis_of(word: str) -> str:
    return AXES.get(word, word)


@dataclass(frozen=True)
class Proven:
    """A plan that a test trains, and compares with one process."""

    num_ranks: int
    words: str
    model: str
    test: str
    compiled: bool = False

    @property
    def features(self) -> frozenset[str]:
        """The columns of the page that it stands in."""
        return features_of(self.words, self.num_ranks) | ({"compile"} if self.compiled else set())

    @property
    def traits(self) -> set[Hashable]:
        """What `make test` owes of it: each word, each pair of axes, the model beside every axis, the number of ranks,
        and degrees other than 2. Of compiled ones, each dense model once: tests/unit/test_moe.py compiles experts."""
        words = features_of(self.words, self.num_ranks)
        axes = {axis_of(word) for word in words}
        if self.compiled:
            return set() if self.model in ROUTED else {("compile", self.model)}
        of_all = {(self.model, axis) for axis in (*axes, "")} | {(self.num_ranks, "")} - {(6, "")}
        rare = {word for word in self.words.split() if word.endswith(("=3", "=4", "=optimizer")) and word[:2] != "mb"}
        return {*words, *itertools.combinations(sorted(axes), 2), *of_all, *rare}


@cache
def features_of(words: str, num_ranks: int) -> frozenset[str]:
    """What a plan does on ranks that are there; `zero` counts where something is shared."""
    plan = Plan.parse(words).resolve(num_ranks)
    layout = plan.layout
    found = {
        "`dp_replicate`": layout.dp_replicate > 1,
        f"`zero={plan.zero}`": plan.is_sharded,
        f"`{plan.context}`": layout.cp > 1,
        f"`sp={'off' if plan.sp is False else 'on'}`": layout.tp > 1,  # not said, it is on: the models allow it
        f"`{plan.schedule}`": layout.pp > 1,
        "`ep`": layout.ep > 1,
        f"`{plan.recompute}`": plan.recompute != "none",
    }
    return frozenset(name for name, is_used in found.items() if is_used)


def num_layers_for(words: str, num_ranks: int) -> int:
    """As few as show what more would: a first, a last and one between them; and in a pipeline one more than there are
    stages, so that these are not alike."""
    plan = Plan.parse(words).resolve(num_ranks)
    return max(3, plan.layout.pp * (plan.v or 1) + 1)


@cache
def proven() -> tuple[Proven, ...]:
    """Every plan of every list, in the order of the lists."""
    dense = [
        Proven(size, " ".join(word for word in plan.split() if not word.startswith("kv=")), "llama", "test_layouts")
        for size, plans in LAYOUTS.items()
        for plan in plans
    ]
    composed = [Proven(size, *case, "test_compositions") for size, cases in PLANS.items() for case in cases]
    compiled = [Proven(*case, "test_compiled", compiled=True) for case in COMPILED]
    return (*dense, *composed, *compiled)


@cache
def in_short() -> frozenset[Proven]:
    """Those of `make test`. More ranks than cores take more than their share of time, and a compiler takes more."""
    every = proven()
    numbers = covering([plan.traits for plan in every], [plan.num_ranks**1.25 + 8 * plan.compiled for plan in every])
    return frozenset(every[number] for number in numbers)


def is_in_short(test: str, num_ranks: int, words: str, model: str) -> bool:
    """Does `make test` run this one?"""
    return Proven(num_ranks, words, model, test, compiled=test == "test_compiled") in in_short()
