"""Check that parameters, gradients and optimizer state fit into this machine's memory. The bytes are counted.

Activations, buffers and data are not counted, so that no run is rejected that might fit.
"""

from __future__ import annotations

from pathlib import Path

from shoal.blueprint.plan import Plan
from shoal.config.recipe import Recipe
from shoal.errors import Problem

GIB = 2**30
CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
ACCELERATORS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")


def bytes_of_states(recipe: Recipe, plan: Plan, parameters: int, *, ranks: int) -> int:
    """Bytes of parameters, gradients and optimizer state on this many ranks of a resolved plan, together."""
    layout, optim = plan.layout, recipe.optim
    copies = layout.dp_replicate * (1 if plan.zero else layout.dp_shard * layout.cp)
    weight = 8 if plan.precision == "fp64" else 2 if optim.param_dtype == "bf16" else 4
    moment = 2 if optim.state_dtype == "bf16" else max(4, weight)
    moments = 2 * moment if optim.name == "adamw" else moment * bool(optim.momentum)
    return parameters * (2 * weight + moments) * copies * ranks // layout.world_size


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


def check_memory(recipe: Recipe, plan: Plan, parameters: int, *, ranks: int, memory: int) -> list[Problem]:
    """The problem, if the state of `ranks` ranks does not fit into `memory` bytes. 0: the memory is unknown."""
    needed = bytes_of_states(recipe, plan, parameters, ranks=ranks)
    if not memory or needed <= memory:
        return []
    where = f"{ranks} rank{'s' * (ranks > 1)} of {plan.brief()}"
    what = (
        f"parameters, gradients and optimizer state of {parameters / 1e9:.2f} B parameters take"
        f" {needed / GIB:.1f} GiB on {where} (counted), but there are {memory / GIB:.1f} GiB of memory"
    )
    return [Problem("Q012", what, _fix(recipe, plan, parameters, ranks=ranks, memory=memory))]


def _fix(recipe: Recipe, plan: Plan, parameters: int, *, ranks: int, memory: int) -> str:
    """Settings that would fit; a smaller model, if there is none."""
    bf16_moments = recipe.model_copy(update={"optim": recipe.optim.model_copy(update={"state_dtype": "bf16"})})
    tried = []
    if not plan.zero and plan.layout.dp_replicate > 1:
        sharded = Plan(zero=3, tp=plan.tp, pp=plan.pp, cp=plan.cp, mb=plan.mb).resolve(plan.layout.world_size)
        tried.append(("--plan.zero 3", recipe, sharded))
    if recipe.optim.name == "adamw" and recipe.optim.state_dtype == "fp32":
        tried.append(("--optim.state_dtype bf16", bf16_moments, plan))
    fitting = [
        flag for flag, other, its_plan in tried if bytes_of_states(other, its_plan, parameters, ranks=ranks) <= memory
    ]
    smaller = "a smaller --model.preset, or a machine with more memory"
    return f"{', or '.join(fitting) or smaller}; --overcommit starts the run anyway, --dry-run shows its layout"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
