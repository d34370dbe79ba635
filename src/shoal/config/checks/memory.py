"""Check that parameters, gradients and optimizer state fit into this machine's memory. The bytes are counted.

Activations, buffers and data are not counted, so that no run is rejected that might fit.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.errors import Problem

GIB = 2**30
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
PACKED_BYTES = 33 / 64
"""Of a number in 4 bits (`numerics.nf4`), without what is below a hundredth of it."""
ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")


class States(NamedTuple):
    """Bytes by cause."""

    parameters: int
    gradients: int
    optimizer: int


class Frozen(NamedTuple):
    """Numbers of parameters without a gradient."""

    plain: int = 0
    packed: int = 0
    """In 4 bits."""


NONE = Frozen()


def bytes_of_states(
    recipe: Recipe, plan: Plan, trained: int, *, frozen: Frozen = NONE, ranks: int, moments: float | None = None
) -> States:
    """Bytes of parameters, gradients and optimizer state on this many ranks of a resolved plan, together. `moments`: as
    in `optimizer_bytes`."""
    layout, optim = plan.layout, recipe.optim
    whole = layout.dp_replicate * layout.dp_shard * layout.cp  # packed weights are not sharded
    copies = layout.dp_replicate if plan.zero else whole
    weight = 8 if plan.precision == "fp64" else 2 if optim.param_dtype == "bf16" else 4
    is_lower = recipe.model.lora is not None and plan.precision in ("bf16", "fp16", "fp8")
    plain = frozen.plain * (2 if is_lower else weight)  # below adapters it is in the precision of the arithmetic
    optimizer = round(trained * optimizer_bytes(recipe, weight, moments))
    of_one_copy = (trained * weight + plain, trained * weight, optimizer)
    found = States(*(size * copies * ranks // layout.world_size for size in of_one_copy))
    packed = int(frozen.packed * PACKED_BYTES) * whole * ranks // layout.world_size
    return found._replace(parameters=found.parameters + packed)


def optimizer_bytes(recipe: Recipe, weight: int = 4, moments: float | None = None) -> float:
    """Bytes of the optimizer, and of a moving average, for each trained parameter of `weight` bytes.

    `moments`: numbers that the optimizer keeps for a parameter. None: the fewest that it may keep; those of muon and
    adafactor depend on the shapes of the model.
    """
    fewest = {"adamw": 2, "lamb": 2, "lion": 1, "lars": 1, "muon": 1, "sgd": int(bool(recipe.optim.momentum))}
    moment = 2 if recipe.optim.state_dtype == "bf16" else max(4, weight)
    number = fewest.get(recipe.optim.name, 0) if moments is None else moments
    return moment * number + (0 if recipe.run.ema is None else max(4, weight))


def host_memory() -> int:
    """Bytes of this machine's memory and swap, or of this process's cgroup limit if that is less. 0: unknown."""
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdecimal()}
    swap = sizes.get("SwapTotal:", 0)
    total = sizes.get("MemTotal:", 0) + swap
    limits = [int(text) + swap for path in CGROUPS if (text := _read(path).strip()).isdecimal()]
    return min([total, *limits]) if total else 0


def has_no_accelerator() -> bool:
    """Whether this machine has no device file of an accelerator; found without torch."""
    return not any(Path(path).exists() for path in ACCELERATORS)


def check_memory(
    recipe: Recipe,
    plan: Plan,
    trained: int,
    *,
    frozen: Frozen = NONE,
    ranks: int,
    memory: int,
    moments: float | None = None,
) -> list[Problem]:
    """The problem, if the state of `ranks` ranks does not fit into `memory` bytes. 0: the memory is unknown."""
    states = bytes_of_states(recipe, plan, trained, frozen=frozen, ranks=ranks, moments=moments)
    needed = sum(states)
    if not memory or needed <= memory:
        return []
    where = f"{ranks} rank{'s' * (ranks > 1)} of {plan.brief()}"
    parameters, gradients, optimizer = (size / GIB for size in states)
    what = (
        f"{(trained + sum(frozen)) / 1e9:.2f} B parameters take {needed / GIB:.1f} GiB on {where} (counted: parameters"
        f" {parameters:.1f}, gradients {gradients:.1f}, optimizer state {optimizer:.1f}), but there are"
        f" {memory / GIB:.1f} GiB of memory"
    )
    return [
        Problem("Q012", what, _fix(recipe, plan, trained, frozen=frozen, ranks=ranks, memory=memory, moments=moments))
    ]


def _fix(
    recipe: Recipe, plan: Plan, trained: int, *, frozen: Frozen, ranks: int, memory: int, moments: float | None
) -> str:
    """Settings that would fit; a smaller model, if there is none."""
    bf16_moments = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"state_dtype": "bf16"})})
    tried = []
    if not plan.zero and plan.layout.dp_replicate > 1 and recipe.optim.name != "adafactor":
        sharded = Plan(zero=3, tp=plan.tp, pp=plan.pp, cp=plan.cp, mb=plan.mb).resolve(plan.layout.world_size)
        tried.append(("--plan.zero 3", recipe, sharded))
    if recipe.optim.name == "adamw" and recipe.optim.state_dtype == "fp32":
        tried.append(("--optim.state_dtype bf16", bf16_moments, plan))
    fitting = [
        flag
        for flag, other, its_plan in tried
        if sum(bytes_of_states(other, its_plan, trained, frozen=frozen, ranks=ranks, moments=moments)) <= memory
    ]
    smaller = "a smaller --model.preset, or a machine with more memory"
    return f"{', or '.join(fitting) or smaller}; --overcommit starts the run anyway, --dry-run shows its layout"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
