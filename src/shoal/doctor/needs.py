"""Checks of this host against what a recipe needs: memory, disk, shared memory, files, cores, GPUs, data."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.config.checks.memory import optimizer_bytes
from shoal.config.recipe import DataSection, Recipe
from shoal.doctor.bounded import Check
from shoal.doctor.checks import cores, files, gpu, memory
from shoal.doctor.checks.nvml import Driver, NvmlError, read_driver
from shoal.doctor.finding import GIB, MIB, Finding, counted, ok, size, warning, will_fail

OF_A_PROCESS = 350 * MIB
"""Host memory of a CPU rank before its first tensor; measured with torch 2.13: 0.33 GiB resident, half of it shared."""
OF_A_GPU_PROCESS = 3 * GIB
"""The same of a rank with a CUDA context; an assumption."""
TIGHT = 0.9
"""Part of a limit from which a prediction may exceed it by its error."""
MOST_LOADERS = 4
"""Processes that `data.workers: auto` may start per rank."""
_BUILT_IN = ("python", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A recipe, its ranks on this host, and its predicted figures."""

    recipe: Recipe
    ranks: int
    """Ranks on this host."""
    world_size: int
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """As `shoal train --dry-run --json` has them; empty: unknown."""

    @property
    def loaders(self) -> int:
        """Processes that load data, per rank, at most."""
        workers = self.recipe.data.workers
        return min(MOST_LOADERS, cores.whole_cores()) if workers == "auto" else workers

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch of one rank: tokens and labels of 8 bytes, or an image of floats."""
        data = self.recipe.data
        samples = -(-data.global_batch // max(1, self.world_size))
        is_images = data.format == "images" or (data.source == "synthetic" and data.synthetic_kind == "images")
        return samples * (12 * data.image_size**2 if is_images else 16 * data.seq_len)

    @property
    def state_bytes(self) -> int:
        """Bytes of a checkpoint: weights and optimizer state; 0: unknown."""
        total, trained = (int(self.predicted.get(key, 0)) for key in ("parameters", "trained_parameters"))
        weight = 2 if self.recipe.optim.param_dtype == "bf16" else 4
        return round(total * weight + trained * optimizer_bytes(self.recipe, weight))


def checks(needs: Needs) -> Iterator[Check]:
    """The checks of a recipe on this host."""
    yield Check("host memory", lambda: host_memory(needs))
    yield Check("GPUs of the plan", lambda: gpu_memory(needs), gpu.SECONDS)
    yield Check("shared memory", lambda: shared_memory(needs), 1.0)
    yield Check("open files", lambda: memory.open_files(_open_files(needs)))
    yield Check("cores of the plan", lambda: threads(needs))
    yield from (files.directory_check(*each) for each in folders(needs))
    yield from map(data_check, data_paths(needs.recipe))


def host_memory(needs: Needs, available: Callable[[], tuple[int, str]] = memory.available) -> Iterator[Finding]:
    """The ranks of this host together need less than is available."""
    predicted = needs.predicted.get("memory")
    free, where = available()
    if predicted is None or not free:
        return
    if _uses_gpu(needs.recipe):
        needed = certain = needs.ranks * OF_A_GPU_PROCESS + needs.state_bytes
        why = f"{counted(needs.ranks, 'rank')} of {size(OF_A_GPU_PROCESS)}, and a copy of what is saved"
    else:
        per_rank = predicted["total"] - predicted.get("context", 0) + OF_A_PROCESS
        stages = needs.recipe.plan.pp or 1
        fullest = -(-needs.ranks // stages)  # ranks of one stage; those of others may need less
        needed, certain = needs.ranks * per_rank, fullest * per_rank + (needs.ranks - fullest) * OF_A_PROCESS
        why = f"{counted(needs.ranks, 'rank')} of {'at most ' * (stages > 1)}{size(per_rank)}"
    evidence = f"{size(needed)} predicted ({why}); {size(free)} available of {where}"
    fix = "shoal train RECIPE --plan auto   # or --plan 'mb=1 recompute=full', or --plan zero=3"
    if certain > free:
        yield will_fail("host memory", evidence, fix)
    elif needed > TIGHT * free:
        yield warning("host memory", evidence, fix)
    else:
        yield ok("host memory", evidence)


def gpu_memory(needs: Needs, read: Callable[[], Driver] = read_driver) -> Iterator[Finding]:
    """There is a GPU for each rank of this host, with enough memory."""
    if needs.recipe.launch.device == "cpu":
        return
    try:
        gpus = read().gpus
    except (OSError, NvmlError):
        gpus = ()
    seen = gpu.visible(gpus) if gpus else []
    if seen is None:
        return
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    where = "here" if named is None else f"in CUDA_VISIBLE_DEVICES={named!r}"
    if not seen:
        if needs.recipe.launch.device == "cuda":
            evidence = f"launch.device is cuda, and there is no GPU {where}"
            yield will_fail("GPUs of the plan", evidence, "--launch.device cpu")
        return
    if needs.ranks > len(seen):
        evidence = f"{counted(needs.ranks, 'rank')}, but {counted(len(seen), 'GPU')} {where}"
        yield will_fail("GPUs of the plan", evidence, f"--nproc {len(seen)}   # or --launch.device cpu")
    predicted = needs.predicted.get("memory", {}).get("total")
    if predicted is None:
        return
    least = min(gpus[index].free for index in seen[: needs.ranks])
    evidence = f"{size(predicted)} predicted on the fullest rank; {size(least)} free on the fullest GPU"
    fix = "shoal train RECIPE --plan auto   # the fastest plan that fits"
    kind = will_fail if predicted > least else warning if predicted > TIGHT * least else None
    yield kind("GPUs of the plan", evidence, fix) if kind else ok("GPUs of the plan", evidence)


def _uses_gpu(recipe: Recipe) -> bool:
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return recipe.launch.device != "cpu" and bool(gpu.device_files()) and not is_hidden


def shared_memory(needs: Needs) -> Iterator[Finding]:
    """Batches of loaders wait in shared memory, and so do checkpoints of `checkpoint.memory_every`."""
    recipe = needs.recipe
    batches = needs.ranks * needs.loaders * (recipe.data.prefetch + 1) * needs.batch_bytes
    saves = 3 * needs.state_bytes if recipe.checkpoint.memory_every.amount else 0
    found = files.free_bytes(memory.SHM)
    if found is None:
        return
    loaders = (
        f"{counted(needs.ranks, 'rank')} × {counted(needs.loaders, 'loader')} × {recipe.data.prefetch + 1} batches"
    )
    evidence = f"{size(batches + saves)} needed ({loaders} of {size(needs.batch_bytes)}"
    evidence += f", saves of {size(saves)})" if saves else ")"
    evidence += f"; {size(found)} free in {memory.SHM}"
    if batches + saves > found:
        gigabytes = f"{-(-2 * (batches + saves) // GIB)}g"
        yield will_fail("shared memory", evidence, f"{memory.larger_shm(gigabytes)}; or --data.workers 0")
    else:
        yield ok("shared memory", evidence)


def _open_files(needs: Needs) -> int:
    """Open files of one rank: libraries and data, connections to all ranks in a few groups, tensors of loaders."""
    return 256 + 8 * needs.world_size + 16 * needs.loaders * (needs.recipe.data.prefetch + 1)


def threads(needs: Needs) -> Iterator[Finding]:
    """More threads than cores wait for each other at every operation."""
    number, why = cores.usable()
    each = needs.recipe.launch.threads or max(1, int(number) // needs.ranks)
    if _uses_gpu(needs.recipe):
        each = 1  # the GPU computes; a rank needs a core to start kernels
    evidence = f"{counted(needs.ranks, 'rank')} × {counted(each, 'thread')}; {why}"
    if needs.ranks * each > number:
        fits = f"--launch.threads {max(1, int(number) // needs.ranks)}"
        fix = fits if needs.ranks <= number else f"--nproc {max(1, int(number))}"
        yield warning("cores of the plan", evidence, fix)
    else:
        yield ok("cores of the plan", evidence)


Folder = tuple[str, Path, str, int]
"""The name of a check, a directory, the fix, and the bytes that are needed there."""


def folders(needs: Needs) -> Iterator[Folder]:
    """The directories that a run writes to."""
    recipe = needs.recipe
    run = Path(recipe.run.dir or Path("runs") / recipe.run.name)
    kept = needs.state_bytes * (recipe.checkpoint.keep + 1)  # one more while it is written
    where = recipe.checkpoint.dir
    if where is None:
        yield "checkpoints", run / "checkpoints", "--run.dir SOMEWHERE_ELSE", kept
        return
    yield "run directory", run, "--run.dir SOMEWHERE_ELSE", 0
    if "://" not in where:
        yield "checkpoints", Path(where), "--checkpoint.dir SOMEWHERE_ELSE", kept


def data_paths(recipe: Recipe) -> list[str]:
    """Sources of data that are files or directories."""
    return [section.source for section in recipe.data.each if isinstance(section.source, str) and _is_path(section)]


def _is_path(section: DataSection) -> bool:
    source = str(section.source)
    return source not in _BUILT_IN and not source.startswith("hf:") and "://" not in source


def data_check(source: str) -> Check:
    """The check of one source of data."""

    def hangs(seconds: float) -> Finding:
        evidence = f"{source}: nothing was read within {seconds:g} s; the file system hangs"
        return will_fail("data", evidence, "--data.source OTHER_PATH   # or mount it again")

    fix = f"ls -la {source}   # or --data.source OTHER_PATH"
    return Check("data", lambda: files.readable("data", Path(source), fix), files.SECONDS, hangs)
