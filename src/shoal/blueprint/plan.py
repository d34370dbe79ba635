"""The plan: how a run is distributed over its ranks, as one line of words to type, read and compare.

Torch configures each parallelism by objects of its own, built inside a started run. A `Plan` is a value that exists
before any process does. It may leave values open (`tp=2`); `resolve` fills them in for a number of ranks. The command
line, YAML and Python take the same words, and a plan prints itself in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, cast

from shoal.blueprint.layout import Layout, divisors
from shoal.blueprint.plan_conflicts import VIRTUAL_STAGES as VIRTUAL_STAGES
from shoal.blueprint.plan_conflicts import check_conflicts, check_world_size, multiples_around
from shoal.blueprint.plan_parser import BARE_WORDS as BARE_WORDS
from shoal.blueprint.plan_parser import CHOICES as CHOICES
from shoal.blueprint.plan_parser import DEGREES as DEGREES
from shoal.blueprint.plan_parser import KEYS, Context, Offload, check_values, parse_words, read_mapping
from shoal.blueprint.plan_parser import Precision as Precision
from shoal.blueprint.plan_parser import Recompute as Recompute
from shoal.blueprint.plan_parser import Schedule as Schedule
from shoal.blueprint.replicas import compress_words, sync_words
from shoal.errors import Problem, ShoalError, listed, raise_if


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How a run is distributed over its ranks: the degree of each axis, and how a step is computed.

    The words are those of `shoal train --plan`. A value that is None is open; `resolve` fills it in.

    >>> plan = Plan.parse("bf16 tp=2 zero=3 mb=4").resolve(8)
    >>> plan.layout.dp_shard, plan.num_microbatches(32)
    (4, 2)
    >>> print(plan)
    dp_replicate=1 dp_shard=4 cp=1 tp=2 pp=1 ep=1 zero=3 v=1 mb=4 bf16
    """

    dp_replicate: int | None = None
    """Replicas of the model, each trained on its own samples. None: all remaining ranks if zero=0, else 1."""

    dp_shard: int | None = None
    """Ranks that share one copy of the parameters, each with its own samples. None: all remaining ranks if zero is 1,
    2 or 3, else 1."""

    cp: int | None = None
    """Ranks that divide the tokens of each sample. None: 1."""

    context: Context | None = None
    """How cp ranks attend to each other's tokens. ring: keys and values travel around a ring. ulysses: heads are
    exchanged for tokens. None: ring where cp > 1."""

    tp: int | None = None
    """Ranks that divide the weights of each layer. None: 1."""

    pp: int | None = None
    """Ranks that divide the layers. None: 1."""

    ep: int | None = None
    """Ranks that divide the experts; divides dp_shard x cp. None: 1."""

    zero: int | None = None
    """State that dp_shard x cp ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters. None: 3
    where dp_shard > 1 or ep > 1 is set, else 0."""

    schedule: Schedule | None = None
    """The order of forwards and backwards in a pipeline. None: 1f1b, or interleaved where v > 1 is set."""

    v: int | None = None
    """Stages that each pipeline rank holds. None: 1, but 2 for interleaved, looped, zbv and dualpipev."""

    sp: bool | None = None
    """Sequence parallelism: the tp ranks also divide the tokens between their layers. Same traffic, less memory. None:
    on where tp > 1 and the model's description allows it."""

    mb: int | None = None
    """Sequences per microbatch and data rank. None: a rank's whole share of the batch in one microbatch."""

    recompute: Recompute = "none"
    """Activations that the backward computes again instead of storing them: none, a cheap part of each block
    (selective), or whole blocks (full)."""

    precision: Precision = "fp32"
    """The dtype of the matrix products in forward and backward."""

    offload: str = "none"
    """State in host memory: none, the optimizer state, or also the parameters. `optimizer:FOLDER`: the optimizer state
    in files."""

    compress: str | None = None
    """Gradient compression between replicas: `fp16`, `bf16`, `int8`, `1bit`, `topk:0.01`, `randomk:0.1` or
    `powersgd:4`. None: no compression."""

    sync: str | None = None
    """How often replicas synchronize: `local:8`, `diloco:50`. None: at every step. auto: `shoal train` measures the
    link when the run begins, and chooses both `sync` and `compress`."""

    def __post_init__(self) -> None:
        _raise(check_values({key: getattr(self, key) for key in KEYS}), "the plan")

    @classmethod
    def of(cls, value: Plan | str | Mapping[str, Any] | None) -> Plan:
        """Make a plan from a plan, its words, its keys and values, or None for an open one."""
        if isinstance(value, Plan):
            return value
        if value is None or isinstance(value, str):
            return cls.parse(value or "auto")
        if not isinstance(value, Mapping):
            raise ShoalError(
                f"a plan must be words or a mapping, got {value!r}", fix="'tp=2 zero=3' or {'tp': 2}", code="P008"
            )
        read = read_mapping(value)
        _raise(read.problems, "the plan")
        return cls(**read.values)

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read words in any order; `auto` stands for no word.

        >>> Plan.parse("tp=2 FULL_SHARD") == Plan(tp=2, zero=3)
        True
        """
        return cls(**parse_words(text))

    def to_mapping(self) -> dict[str, Any]:
        """The values that differ from the defaults, by key; `Plan.of` reads them back."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def __str__(self) -> str:
        bare = ("schedule", "precision", "context")
        words = [str(value) if key in bare else f"{key}={_spelled(value)}" for key, value in self.to_mapping().items()]
        return " ".join(words) or "auto"

    def brief(self) -> str:
        """The words of a resolved plan without degrees of 1.

        >>> Plan.parse("mb=4").resolve(2).brief()
        'dp_replicate=2 zero=0 mb=4'
        """
        values = self.to_mapping()
        trivial = {key for key in (*DEGREES, "v") if values.get(key) == 1}
        return str(Plan.of({key: value for key, value in values.items() if key not in trivial}))

    @property
    def is_resolved(self) -> bool:
        """True if no value is open; then there is a `layout`."""
        degrees = (self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep)
        return None not in (*degrees, self.zero, self.v) and (self.pp == 1 or self.schedule is not None)

    @property
    def layout(self) -> Layout:
        """The ranks on their axes."""
        if not self.is_resolved:
            raise ShoalError(
                f"plan '{self}' leaves open how many ranks each axis has", fix="plan.resolve(world_size)", code="P010"
            )
        return _layout(self.dp_replicate, self.dp_shard, self.cp, self.tp, self.pp, self.ep)

    def resolve(self, world_size: int) -> Plan:
        """Fill in all open values for a number of ranks; raises with all problems.

        Ranks that no axis claims go to `dp_shard`, or to `dp_replicate` when zero is 0. A resolved plan stays as it is.
        """
        filled = self.fill(world_size)
        raise_if(self._problems(filled, world_size), f"plan '{self}' on {world_size} rank{'s' * (world_size != 1)}")
        return filled

    def check(self, world_size: int) -> list[Problem]:
        """All problems of the plan on a number of ranks. Empty: `resolve` returns a plan."""
        return self._problems(self.fill(world_size), world_size)

    def _problems(self, filled: Plan, world_size: int) -> list[Problem]:
        axis = self._remainder_axis
        misfit = list(check_world_size(self, axis, world_size))
        unknown = axis if misfit and getattr(self, axis) is None else None
        return [*misfit, *check_conflicts(filled, unknown=unknown)]

    def fill(self, world_size: int) -> Plan:
        """Fill in all open values without any check, so that an invalid plan can be checked further."""
        zero, remainder_axis = self._zero, self._remainder_axis
        filled: dict[str, Any] = {name: getattr(self, name) or 1 for name in DEGREES}
        if getattr(self, remainder_axis) is None:
            claimed = prod(degree for axis, degree in filled.items() if axis != "ep")  # ep divides ranks, it adds none
            filled[remainder_axis] = max(1, world_size // claimed)
        default: Schedule = "1f1b" if self.v in (None, 1) else "interleaved"
        schedule = self.schedule or (default if filled["pp"] > 1 else None)
        v = self.v or (2 if schedule in ("interleaved", "looped", "zbv", "dualpipev") else 1)
        context = self.context or ("ring" if filled["cp"] > 1 else None)
        return replace(self, **filled, zero=zero, schedule=schedule, v=v, context=context)

    def with_layout(self) -> Plan:
        """The plan, or the same with ep=1 if no layout has its ep, so that the rest of it can be checked."""
        has_layout = (self.dp_shard or 1) * (self.cp or 1) % (self.ep or 1) == 0
        return self if has_layout else replace(self, ep=1)

    @property
    def _zero(self) -> int:
        """`zero`, or the value that an open one gets."""
        return self.zero if self.zero is not None else 3 * (max(self.dp_shard or 1, self.ep or 1) > 1)

    @property
    def _remainder_axis(self) -> str:
        """The axis that gets the ranks that no other axis claims."""
        return "dp_shard" if self._zero else "dp_replicate"

    @property
    def offloaded(self) -> Offload:
        """What is offloaded, wherever to."""
        return cast("Offload", self.offload.partition(":")[0])

    @property
    def offload_folder(self) -> str | None:
        """Where the optimizer state is; None: in memory."""
        return self.offload.partition(":")[2] or None

    @property
    def compression(self) -> compress_words.Compression | None:
        """The parsed `compress`; None: no compression."""
        return None if self.compress is None else compress_words.Compression.parse(self.compress)

    @property
    def sync_spec(self) -> sync_words.SyncSpec | None:
        """The parsed `sync`; None also for `auto`."""
        return None if self.sync in (None, sync_words.AUTO) else sync_words.SyncSpec.parse(str(self.sync))

    @property
    def gradient_axis(self) -> str:
        """The axis over which gradients are averaged where nothing is sharded."""
        return "dp_replicate" if self.layout.cp == 1 else "dp_cp"

    @property
    def shard_axis(self) -> str:
        """The axis along which parameters are sharded; it includes the cp ranks."""
        return "dp_shard" if self.layout.cp == 1 else "dp_shard_cp"

    @property
    def number_axis(self) -> str:
        """The axis over which `zero` averages gradients of parameters of shape (), which it cannot cut."""
        return self.shard_axis if self.layout.dp_replicate == 1 else "dp_cp"

    @property
    def is_sharded(self) -> bool:
        """Whether `zero` shards anything over more than one rank."""
        return bool(self.zero) and self.layout.degree(self.shard_axis) > 1

    def microbatch_size(self, batch: int) -> int:
        """Sequences per microbatch on one data rank, for a global batch."""
        self._check_batch(batch)
        return self.mb or batch // self.layout.data_degree

    def num_microbatches(self, batch: int) -> int:
        """Microbatches per step on one data rank, for a global batch."""
        return batch // self.layout.data_degree // self.microbatch_size(batch)

    def _check_batch(self, batch: int) -> None:
        ranks, mb = self.layout.data_degree, self.mb or 1
        if batch >= 1 and batch % (mb * ranks) == 0:
            return
        data = f"dp_replicate={self.dp_replicate} x dp_shard={self.dp_shard}"
        rule = f"mb={mb} x {data} = {mb * ranks}" if self.mb else f"{data} = {ranks}"
        fixes = [f"--data.global_batch {listed(multiples_around(batch, mb * ranks))}"]
        if self.mb:
            near = multiples_around(batch, ranks)[0]
            change = "" if near == batch else f"--data.global_batch {near} with "
            fixes.append(f"{change}--plan.mb {listed(divisors(near // ranks))}")
        raise ShoalError(f"batch {batch} is not divisible by {rule}", fix=", or ".join(fixes), code="P011")


@lru_cache(maxsize=2**12)
def _layout(*degrees: int | None) -> Layout:
    return Layout(**{name: degree for name, degree in zip(DEGREES, degrees, strict=True) if degree is not None})


def _spelled(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _raise(problems: Iterable[Problem], title: str) -> None:
    """Raise one problem without a title, and several with it."""
    found = list(problems)
    raise_if(found, title if len(found) > 1 else "")
