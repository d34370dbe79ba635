"""What to type about the verdict of a profile: other values than the run has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.affinity import num_cores
from shoal.blueprint.layout import divisors
from shoal.blueprint.plan import Plan
from shoal.config.duration import Duration
from shoal.observe.profile.profile import FIXES
from shoal.observe.profile.verdict import Verdict
from shoal.parallel.policies import Policies

if TYPE_CHECKING:
    from shoal.config.recipe import CheckpointSection, Recipe

MODEL_AXES = ("tp", "cp", "ep", "pp")
OF_DATA = ("dp", "edp")
"""First words of the axes over which gradients and shards travel."""
LARGER_BATCH = "a larger --data.global_batch"


def cause_of(verdict: Verdict) -> str:
    """The cause of a predicted step that a verdict is about; empty: none, as of what all ranks exchange.

    >>> [cause_of(Verdict(kind="link", cost=1.0, evidence="", axis=axis)) for axis in ("cp_tp", "dp_shard", "world")]
    ['cp', 'dp', '']
    """
    if not verdict.axis:
        return verdict.kind
    first = verdict.axis.partition("_")[0]
    return first if first in MODEL_AXES else "dp" if first in OF_DATA else ""


def plan_changes(verdict: Verdict, plan: Plan, share: int | None) -> list[str]:
    """Words of a plan with which a cause is smaller. The plan is resolved. `share`: the samples of a rank in a step;
    None: not known."""
    mb = plan.mb or share
    if verdict.kind == "recompute":
        less = {"full": ("selective", "none"), "selective": ("none",)}.get(plan.recompute, ())
        return [f"recompute={mode}" for mode in less]
    if verdict.kind == "bubble" and mb is not None:
        return [f"mb={size}" for size in divisors(mb)[-2:-1]]
    if verdict.kind == "idle" and mb is not None and share is not None:
        larger = [size for size in divisors(share) if size > mb and share // size >= plan.layout.pp]
        return [f"mb={size}" for size in larger[:1]]
    if verdict.kind == "link":
        return _with_fewer_bytes(cause_of(verdict), verdict.axis, plan)
    return []


def _with_fewer_bytes(cause: str, axis: str, plan: Plan) -> list[str]:
    if cause in MODEL_AXES:
        return [f"{cause}={degree}" for degree in divisors(plan.layout.degree(cause))[-2:-1]]
    found = ["zero=1"] if cause == "dp" and plan.zero in (2, 3) else []
    can_compress = axis == "dp_replicate" and not plan.zero and plan.compress is None and plan.sync is None
    return [*found, "compress=int8"] if can_compress else found


# ---- in a recipe ----------------------------------------------------------------------------------------------------


def to_type(verdict: Verdict, recipe: Recipe, *, workers: int) -> str:
    """The options of `shoal train` to try, where the planner knows nothing better. The plan of the recipe is resolved.
    `workers`: the processes that prepare batches of a rank."""
    plan, batch, kind = recipe.plan, recipe.data.global_batch, verdict.kind
    share = max(1, batch // plan.layout.data_degree)
    changes = [f"--plan.{word.replace('=', ' ')}" for word in plan_changes(verdict, plan, share)]
    compile_it = [] if recipe.run.compile else ["--run.compile true"]
    if kind == "compute":
        return ", or ".join(["nothing to change: the time is the model's own arithmetic; more ranks", *compile_it])
    if kind == "idle":
        return f"{_either([*compile_it, *changes], LARGER_BATCH)}: fewer and larger kernels"
    if kind == "bucket":
        return _other_bucket(recipe.run.bucket_mb, "--run.bucket_mb auto", "--run.bucket_mb 25")
    if kind == "data":
        return f"--data.workers {max(2, 2 * workers)}, or data on a faster disk"
    if kind == "bubble":
        return f"{_either(changes, LARGER_BATCH)}: more microbatches"
    if kind == "recompute":
        return f"{_either(changes, 'less recomputation in the code of the model')}, if memory allows"
    if kind == "saving":
        return _fewer_saves(recipe.checkpoint)
    if kind == "link":
        return _less_communication(verdict, changes, LARGER_BATCH)
    return FIXES[kind]


def for_cores(recipe: Recipe, per_host: int) -> str:
    """Options with which the ranks of a host have enough cores."""
    threads, cores = recipe.launch.threads, num_cores()
    if per_host > cores:
        return f"--nproc {cores}: more ranks than cores do not compute faster"
    if threads is not None and threads * per_host > cores:
        return f"--launch.threads {max(1, cores // per_host)} in place of {threads}"
    return "top, to find the other programs that use the cores"


def _fewer_saves(checkpoint: CheckpointSection) -> str:
    """Options with which a run saves less often, or faster."""
    found = []
    if checkpoint.every == "auto":
        found.append(f"--checkpoint.mtbf {_doubled(checkpoint.mtbf)}")
    elif (every := Duration.parse(checkpoint.every)).amount:
        found.append(f"--checkpoint.every {_doubled(every)}")
    if checkpoint.memory_every.amount:
        found.append(f"--checkpoint.memory_every {_doubled(checkpoint.memory_every)}")
    return _either([*found, "--checkpoint.dir on a faster disk"], "")


def _doubled(interval: Duration) -> Duration:
    return Duration(2 * interval.amount, interval.unit)


# ---- in a script ----------------------------------------------------------------------------------------------------


def to_change(verdict: Verdict, plan: Plan, policies: Policies) -> str:
    """What a script changes. The plan is resolved."""
    changes, kind = plan_changes(verdict, plan, None), verdict.kind
    compile_it = [] if policies.compute.compile else ["compile=True"]
    if kind == "compute":
        faster = ['Run("bf16")'] if plan.precision == "fp32" else []
        return _either([*faster, *compile_it, "more ranks"], "")
    if kind == "idle":
        return f"{_either(['a larger microbatch', *compile_it], '')}: fewer and larger kernels"
    if kind == "bucket":
        return _other_bucket(policies.sync.bucket_mb, 'Run(bucket_mb="auto")', "Run(bucket_mb=25)")
    if kind == "bubble":
        otherwise = "a larger batch" if plan.mb == 1 else "a smaller mb="
        return f"{_either(changes, otherwise)}, so that there are more microbatches"
    if kind == "recompute":
        return f"{_either(changes, 'less recomputation in the code of the model')}, if memory allows"
    if kind == "link":
        return _less_communication(verdict, changes, "a larger batch")
    return FIXES[kind]


def _less_communication(verdict: Verdict, changes: list[str], larger_batch: str) -> str:
    """Layers exchange bytes for every sample; gradients travel once in a step, and so does what all ranks exchange."""
    if cause_of(verdict) in MODEL_AXES:
        return f"shoal bench comm, and {_either(changes, 'a faster link')}, if memory allows"
    return f"shoal bench comm, and {_either([larger_batch, *changes], '')}: fewer bytes for each sample"


def _other_bucket(present: float | str | None, measured: str, usual: str) -> str:
    """Another size of buckets than the present one."""
    if present == "auto":
        return usual
    return measured if present is None else f"{measured} in place of {present:g}"


def _either(words: list[str], otherwise: str) -> str:
    """`a, b or c`; without words, `otherwise`.

    >>> _either(["a", "b", "c"], ""), _either(["a"], ""), _either([], "d")
    ('a, b or c', 'a', 'd')
    """
    *first, last = words or [otherwise]
    return f"{', '.join(first)} or {last}" if first else last
