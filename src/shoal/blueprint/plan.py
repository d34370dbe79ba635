"""The plan: how a run is spread over its ranks, as one line of words that a person can type, read and compare.

Torch configures each parallelism by objects of its own, built inside a started run. A `Plan` is a value that exists
before any process does. It may leave things open (`tp=2`); `resolve` closes them for a number of ranks. The same words
are taken on the command line, in YAML and in Python, and a plan prints itself in these words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal, get_args

from shoal.blueprint import compression, local_sgd
from shoal.blueprint.aliases import SAME, SETTINGS
from shoal.blueprint.layout import Layout, divisors
from shoal.errors import Problem, ShoalError, listed, nearest, raise_if

Schedule = Literal["gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]
Offload = Literal["none", "optimizer", "parameters"]
Context = Literal["ring", "ulysses"]

DEGREES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
COUNTS = (*DEGREES, "v", "mb")
CHOICES: Mapping[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "schedule": get_args(Schedule),
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
    "offload": get_args(Offload),
    "context": get_args(Context),
}

BARE_WORDS: Mapping[str, tuple[str, Any]] = {
    **{word: ("schedule", word) for word in get_args(Schedule)},
    **{word: ("precision", word) for word in get_args(Precision)},
    **{"ddp": ("zero", 0), "no_shard": ("zero", 0), "shard_grad_op": ("zero", 2)},
    **{"fsdp": ("zero", 3), "full_shard": ("zero", 3), "hybrid_shard": ("zero", 3)},
    **{word: ("context", word) for word in get_args(Context)},
    "sp": ("sp", True),
}
"""Words that stand without a key, and what they say; torch's names of sharding strategies are among them."""

VIRTUAL_STAGES: Mapping[str, int] = {"gpipe": 1, "1f1b": 1, "zbv": 2, "dualpipev": 2}
"""The only `v` that a schedule can have; the others take any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A layout, and what is done on it. None: not said; `resolve` fills it in.

    >>> plan = Plan.parse("bf16 tp=2 zero=3 mb=4").resolve(8)
    >>> plan.layout.dp_shard, plan.num_microbatches(32)
    (4, 2)
    >>> print(plan)
    dp_replicate=1 dp_shard=4 cp=1 tp=2 pp=1 ep=1 zero=3 v=1 mb=4 bf16
    """

    dp_replicate: int | None = None
    """Copies of the parameters, each trained on its own samples. None: all ranks that are left if zero=0, else 1."""

    dp_shard: int | None = None
    """Ranks that share one copy of the parameters, each with its own samples. None: all ranks that are left if zero is
    1, 2 or 3, else 1."""

    cp: int | None = None
    """Ranks that divide the tokens of each sample among them. None: 1."""

    context: Context | None = None
    """How cp ranks attend to each other's tokens: keys and values go round in a ring, or heads are exchanged for tokens
    (ulysses). None: ring where cp > 1."""

    tp: int | None = None
    """Ranks that divide each layer's weights among them. None: 1."""

    pp: int | None = None
    """Ranks that divide the layers among them. None: 1."""

    ep: int | None = None
    """Ranks that divide the experts among them; divides dp_shard x cp. None: 1."""

    zero: int | None = None
    """What dp_shard x cp ranks divide: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. None: 3 where
    dp_shard > 1 or ep > 1 was said, else 0."""

    schedule: Schedule | None = None
    """The order of forwards and backwards in a pipeline. None: 1f1b, or interleaved where v > 1 was said."""

    v: int | None = None
    """Stages that each pipeline rank holds. None: 1, but 2 for interleaved, looped, zbv and dualpipev."""

    sp: bool | None = None
    """Whether the tp ranks also divide the tokens between their layers (sequence parallelism): the same traffic, less
    memory. None: where tp > 1 and the model says which of its modules allow it."""

    mb: int | None = None
    """Sequences per microbatch and data rank. None: a rank's whole share of the batch in one microbatch."""

    recompute: Recompute = "none"
    """What the backward computes again instead of keeping it: nothing, a cheap part of each block, or whole blocks."""

    precision: Precision = "fp32"
    """What forward and backward compute in."""

    offload: Offload = "none"
    """What lives in host memory: nothing, the optimizer state, or parameters as well."""

    compress: str | None = None
    """What travels between replicas in place of gradients: `fp16`, `bf16`, `int8`, `1bit`, `topk:0.01`, `randomk:0.1`
    or `powersgd:4`. None: gradients."""

    sync: str | None = None
    """How often replicas hear of each other: `local:8`, `diloco:50`. None: at every step. auto: `shoal train` chooses,
    and `compress` with it, by what it measures when the run begins."""

    def __post_init__(self) -> None:
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        _raise(_illegal(said), "the plan")

    @classmethod
    def of(cls, value: Plan | str | Mapping[str, Any] | None) -> Plan:
        """A plan from whatever says one: a plan, its words, its keys and values, or None for one that says nothing."""
        if isinstance(value, Plan):
            return value
        if value is None or isinstance(value, str):
            return cls.parse(value or "auto")
        if not isinstance(value, Mapping):
            raise ShoalError(f"{value!r} is not a plan", fix="words such as 'tp=2 zero=3', or the same as a mapping")
        known = {key: value[key] for key in value if key in _names()}
        strangers = [_unknown_key(str(key)) for key in value if key not in _names()]
        _raise([*strangers, *_illegal(known)], "the plan")
        return cls(**known)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read words in any order; `auto`, like no word at all, says nothing.

        >>> Plan.parse("tp=2 FULL_SHARD") == Plan(tp=2, zero=3)
        True
        """
        return cls(**cls.read(text))

    @staticmethod
    def read(text: str) -> dict[str, Any]:
        """What words say, by key; also what would be so without them.

        >>> Plan.read("recompute=none fp32")
        {'recompute': 'none', 'precision': 'fp32'}
        """
        said: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        problems: list[Problem] = []
        for word in (word for word in text.split() if word.lower() != "auto"):
            if isinstance(read := _read(word), Problem):
                problems.append(read)
                continue
            key, value = read
            if key in said:
                problems.append(Problem(f"{key} is said twice: {spelled[key]} and {word}", "leave one of them out"))
            said[key], spelled[key] = value, word
            problems += _illegal({key: value})
        if spelled.get("zero", "").lower() == "hybrid_shard" and not {"dp_replicate", "dp_shard"} & said.keys():
            what = "HYBRID_SHARD shards inside groups of ranks and replicates over the groups, but no degree is said"
            problems.append(Problem(what, "dp_replicate=<number of nodes> beside it"))
        raise_if(problems, f"plan {text!r}")
        return said

    def to_mapping(self) -> dict[str, Any]:
        """What it says, as keys and values; `Plan.of` reads it back."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        bare = ("schedule", "precision", "context")
        words = [str(value) if key in bare else f"{key}={_spelled(value)}" for key, value in self.to_mapping().items()]
        return " ".join(words) or "auto"

    def brief(self) -> str:
        """The words of a resolved plan that change anything: those that `resolve` would say anyway are left out.

        >>> Plan.parse("mb=4").resolve(2).brief()
        'dp_replicate=2 zero=0 mb=4'
        """
        said = self.to_mapping()
        plain = {key for key in (*DEGREES, "v") if said.get(key) == 1}
        return str(Plan.of({key: value for key, value in said.items() if key not in plain}))

    @property
    def is_resolved(self) -> bool:
        """True if nothing is left open; then there is a `layout`."""
        filled = all(getattr(self, name) is not None for name in (*DEGREES, "zero", "v"))
        return filled and (self.pp == 1 or self.schedule is not None)

    @property
    def layout(self) -> Layout:
        """The ranks on their axes."""
        self._check_resolved()
        return _layout(*[getattr(self, name) for name in DEGREES])

    def resolve(self, world_size: int) -> Plan:
        """This plan for a number of ranks, with nothing left open.

        Ranks that no axis claims go to `dp_shard`, or to `dp_replicate` when zero is 0. Doing it again changes nothing.
        """
        zero = self.zero if self.zero is not None else 3 * (max(self.dp_shard or 1, self.ep or 1) > 1)
        takes_the_rest = "dp_shard" if zero else "dp_replicate"
        filled: dict[str, Any] = {name: getattr(self, name) or 1 for name in DEGREES}
        if getattr(self, takes_the_rest) is None:
            filled[takes_the_rest] = max(1, world_size // self._claimed_ranks())
        default: Schedule = "1f1b" if self.v in (None, 1) else "interleaved"
        schedule = self.schedule or (default if filled["pp"] > 1 else None)
        v = self.v or (2 if schedule in ("interleaved", "looped", "zbv", "dualpipev") else 1)
        context = self.context or ("ring" if filled["cp"] > 1 else None)
        plan = replace(self, **filled, zero=zero, schedule=schedule, v=v, context=context)
        problems = [*_world_problems(self, takes_the_rest, world_size), *_conflicts(plan)]
        raise_if(problems, f"plan '{self}' on {world_size} rank{'s' * (world_size != 1)}")
        return plan

    @property
    def compression(self) -> compression.Compression | None:
        """What `compress` says."""
        return None if self.compress is None else compression.Compression.parse(self.compress)

    @property
    def synchrony(self) -> local_sgd.SyncSpec | None:
        """What `sync` says; None also while it is to be chosen."""
        return None if self.sync in (None, local_sgd.AUTO) else local_sgd.SyncSpec.parse(str(self.sync))

    @property
    def gradient_axis(self) -> str:
        """Along which gradients are averaged where nothing is sharded: ranks that see other samples or tokens."""
        return "dp_replicate" if self.layout.cp == 1 else "dp_cp"

    @property
    def shard_axis(self) -> str:
        """Along which parameters are sharded: cp ranks share them as well as samples' ranks do."""
        return "dp_shard" if self.layout.cp == 1 else "dp_shard_cp"

    @property
    def is_sharded(self) -> bool:
        """Whether there is anyone to share parameters with."""
        return bool(self.zero) and self.layout.degree(self.shard_axis) > 1

    def microbatch_size(self, batch: int) -> int:
        """Sequences per microbatch on one data rank, for a global batch."""
        self._check_batch(batch)
        return self.mb or batch // self.layout.data_degree

    def num_microbatches(self, batch: int) -> int:
        """Microbatches per step on one data rank, for a global batch."""
        return batch // self.layout.data_degree // self.microbatch_size(batch)

    def _claimed_ranks(self) -> int:
        return prod(getattr(self, name) or 1 for name in DEGREES if name != "ep")  # ep divides ranks, it brings none

    def _check_resolved(self) -> None:
        if not self.is_resolved:
            raise ShoalError(f"plan '{self}' leaves open how many ranks each axis has", fix="plan.resolve(world_size)")

    def _check_batch(self, batch: int) -> None:
        ranks, mb = self.layout.data_degree, self.mb or 1
        if batch >= 1 and batch % (mb * ranks) == 0:
            return
        data = f"dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard}"
        rule = f"mb={mb} x {data} = {mb * ranks}" if self.mb else f"{data} = {ranks}"
        fixes = [f"--data.global_batch {listed(_multiples_around(batch, mb * ranks))}"]
        if self.mb:
            near = _multiples_around(batch, ranks)[0]
            change = "" if near == batch else f"--data.global_batch {near} with "
            fixes.append(f"{change}--plan.mb {listed(divisors(near // ranks))}")
        raise ShoalError(f"batch {batch} is not divisible by {rule}", fix=", or ".join(fixes))


EXAMPLES = {"compress": "int8", "sync": "diloco:50"}
SWITCH = {"on": True, "off": False, "true": True, "false": False}


@lru_cache(maxsize=2**12)
def _layout(*degrees: int) -> Layout:
    return Layout(**dict(zip(DEGREES, degrees, strict=True)))


def _spelled(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _names() -> list[str]:
    return [field.name for field in fields(Plan)]


def _raise(problems: Iterable[Problem], title: str) -> None:
    """One problem speaks for itself; several are headed by where they are."""
    found = list(problems)
    raise_if(found, title if len(found) > 1 else "")


def _multiples_around(number: int, divisor: int) -> list[int]:
    """The nearest multiples at or below a number and above it, from the first one on."""
    below = max(0, number) // divisor * divisor
    return [multiple for multiple in (below, below + divisor) if multiple]


def _nearest_or_all(word: str, known: Iterable[str]) -> str:
    return nearest(word.lower(), known := list(known)) or f"one of {', '.join(known)}"


def _unknown_key(key: str) -> Problem:
    return Problem(f"a plan has no key {key!r}", SETTINGS.get(key) or _nearest_or_all(key, _names()))


def _read(word: str) -> tuple[str, Any] | Problem:
    """What one word says: key and value."""
    key, equals, value = word.partition("=")
    key = key.lower()
    if not equals:
        if key in BARE_WORDS:
            return BARE_WORDS[key]
        if key in _names():
            return Problem(f"{word!r} needs a value", f"{key}={listed(CHOICES.get(key, [EXAMPLES.get(key, '2')]))}")
        if (meant := SETTINGS.get(key) or SAME.get(key)) is not None:
            return Problem(f"{word!r} is not a word of a plan", meant)
        if (meant := _value_of(key)) is not None:
            return Problem(f"{word!r} does not stand alone", meant)
        known = dict.fromkeys([*BARE_WORDS, *_names()])
        values = [*compression.METHODS, *local_sgd.WAYS]
        near = _value_of(nearest(key, values) or "") if nearest(key, known) is None else None
        return Problem(f"{word!r} is not a word of a plan", near or _nearest_or_all(word, known))
    if key not in _names():
        return _unknown_key(key)
    if key == "sp":
        return key, SWITCH.get(value.lower(), value)
    is_number = key in (*COUNTS, "zero") and value.removeprefix("-").isdecimal()
    return key, int(value) if is_number else value


def _value_of(word: str) -> str | None:
    """A bare word with its key, if it would be the value of one."""
    name = word.partition(":")[0]
    if name in compression.METHODS:
        return f"compress={word}"
    way = next((way for way in local_sgd.WAYS if way == name), None)
    return None if way is None else f"sync={word if word != way else local_sgd.EXAMPLES[way]}"


def _illegal(said: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with each value by itself."""
    for key, value in said.items():
        if value is None and key not in ("recompute", "precision", "offload"):
            continue
        if key in COUNTS and (type(value) is not int or value < 1):  # True is an int, but not a degree
            yield Problem(f"{key}={value!r} is not a whole number of at least 1", f"{key}=1, {key}=2, ...")
        elif key in CHOICES and (type(value), value) not in [(type(legal), legal) for legal in CHOICES[key]]:
            yield Problem(f"{key}={value!r} does not exist", f"{key}={listed(CHOICES[key])}")
        elif key == "sp" and not isinstance(value, bool):
            yield Problem(f"sp={value} is neither on nor off", "sp=on or sp=off")
        elif key == "compress":
            yield from filter(None, [compression.problem_of(value)])
        elif key == "sync":
            yield from filter(None, [local_sgd.problem_of(value)])


def _world_problems(plan: Plan, takes_the_rest: str, world_size: int) -> Iterator[Problem]:
    """Whether the degrees that were said fill the world, or leave a whole number for the axis that takes the rest."""
    said = {axis: getattr(plan, axis) for axis in DEGREES if getattr(plan, axis) is not None and axis != "ep"}
    claimed, has_rest = plan._claimed_ranks(), takes_the_rest not in said
    if world_size >= 1 and (world_size % claimed == 0 if has_rest else world_size == claimed):
        return
    fixes = []
    for axis, degree in said.items():
        room, remainder = divmod(world_size, claimed // degree)
        if room >= 1 and not remainder:
            fixes.append(f"{axis}={listed(divisors(room) if has_rest else [room])}")
    if not has_rest and world_size > claimed and world_size % claimed == 0:
        other = "dp_replicate" if takes_the_rest == "dp_shard" else "dp_shard"
        if other not in said and (other == "dp_replicate" or plan.zero is None):
            fixes.append(f"{other}={world_size // claimed}")
    starts = _multiples_around(world_size, claimed) if has_rest else [claimed]
    fixes.append(f"start {listed(starts)} rank{'s' * (starts != [1])}")
    words = " x ".join(f"{axis}={degree}" for axis, degree in said.items()) or "one rank"
    total = f"{words} = {claimed}" if len(said) > 1 else words
    verb = "does not divide" if has_rest else "is not"
    yield Problem(f"{total} {verb} the number of ranks, {world_size}", ", or ".join(fixes))


def _conflicts(plan: Plan) -> Iterator[Problem]:
    """What cannot go together in a plan that has nothing left open."""
    if plan.zero == 0 and (plan.dp_shard or 1) > 1:
        fix = f"zero=1, 2 or 3, or dp_replicate={plan.dp_shard} instead of dp_shard={plan.dp_shard}"
        yield Problem(f"dp_shard={plan.dp_shard} with zero=0: nothing would be sharded", fix)
    if plan.offload == "parameters" and not plan.zero:
        yield Problem("offload=parameters moves shards to host memory, but zero=0 shards nothing", "zero=3 beside it")
    if not plan.zero and (plan.ep or 1) > 1:
        what = f"ep={plan.ep} with zero=0: whoever holds other experts than its neighbours has a shard of the model"
        yield Problem(what, "zero=1, 2 or 3")
    if plan.context and plan.cp == 1:
        yield Problem(f"{plan.context} divides tokens among cp ranks, but cp=1", f"cp=2, or leave {plan.context} out")
    yield from _nobody_to_meet(plan)
    if plan.sync == local_sgd.AUTO and plan.compress:
        yield Problem(f"sync=auto chooses compress too, and compress={plan.compress} is said", "leave one of them out")
    if plan.sp and plan.tp == 1:
        yield Problem("sp divides tokens among tp ranks, but tp=1", "tp=2 or more, or leave sp out")
    if plan.pp == 1:
        if plan.schedule is not None or (plan.v or 1) > 1:
            word = plan.schedule or f"v={plan.v}"
            yield Problem(f"{word} orders the stages of a pipeline, but pp=1", f"pp=2 or more, or leave {word} out")
    elif plan.schedule and plan.v != (legal := VIRTUAL_STAGES.get(plan.schedule, plan.v)):
        yield Problem(f"{plan.schedule} cannot have v={plan.v} stages per rank", f"v={legal}, or interleaved")
    try:
        plan.layout  # noqa: B018  (a layout checks itself)
    except ShoalError as error:
        yield from error.problems


def _nobody_to_meet(plan: Plan) -> Iterator[Problem]:
    """Words about what replicas send each other, where several ranks hold one replica. One rank alone may say them: the
    same recipe runs there too."""
    degrees = [getattr(plan, axis) or 1 for axis in DEGREES if axis != "ep"]
    is_alone = (plan.dp_replicate or 1) == 1 and prod(degrees) > 1
    shares_tokens = (plan.cp or 1) > 1 and not plan.zero  # whose ranks send each other gradients too
    for word, is_idle in ((f"compress={plan.compress}", plan.compress), (f"sync={plan.sync}", plan.sync)):
        if is_alone and is_idle and not (shares_tokens and word.startswith("compress")):
            what = f"{word} is about what replicas send each other, and dp_replicate=1: there is one"
            yield Problem(what, f"dp_replicate=2 or more, or leave {word} out")
