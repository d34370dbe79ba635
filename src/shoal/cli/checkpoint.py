"""`shoal checkpoint ls | verify | diff | export | import | merge`: list, check, compare and convert checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shoal.checkpoint.storage.locate import SavedStep, find, find_all, folder_at, is_url, listing
from shoal.cli.actions import pick
from shoal.cli.options import parse_options
from shoal.cli.reports import checkpoint as report
from shoal.cli.reports.console import WIDTH, show
from shoal.config.parse_units import size_in_bytes
from shoal.errors import Problem, ShoalError, raise_if

if TYPE_CHECKING:
    from rich.console import Console

Directory = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY")]

ABOUT = {
    "ls": "list steps with sizes, plans and tensors; also drafts and damaged steps",
    "verify": "read every byte and compare it with its hash",
    "diff": "compare two steps tensor by tensor, whatever layouts wrote them",
    "export": "write a step as safetensors, or for Hugging Face, torch.distributed.checkpoint or torch.load",
    "merge": "write the model of a run with its LoRA added to the weights",
    "import": "make a checkpoint from safetensors, or a folder of Hugging Face, torch, DeepSpeed or Megatron-LM",
}


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the checkpoints of a directory, with their contents, their plans and their problems. Files are not read;
    `shoal checkpoint verify` reads them.

    shoal checkpoint ls runs/tiny
    """

    directory: Directory
    """The directory of a run, of its checkpoints, or of one step; or the URL of checkpoints or a step."""

    tensors: bool = False
    """Also list the tensors of each step."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every byte of a checkpoint and compare it with its hash. Exit code 0: intact, 1: damaged.

    shoal checkpoint verify runs/tiny --all
    """

    directory: Directory
    """The directory of a run, of its checkpoints, or of one step; or the URL of checkpoints or a step."""

    step: int | None = None
    """The step. None: the newest."""

    all: bool = False
    """Verify all steps."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them. Exit code 0: all tensors are equal, 1: one
    is not. Other differences are shown and do not change the exit code.

    shoal checkpoint diff runs/a/checkpoints/step-00000100 runs/b/checkpoints/step-00000100
    """

    first: Directory
    """The directory of a step, or of a run, whose newest step is compared; or a URL."""

    second: Directory
    """The directory or URL of the other step or run."""

    weights: bool = False
    """Compare the weights alone, without optimizer state."""

    top: int = 20
    """Number of tensors to show."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Export a checkpoint to another format: full tensors under the model's own names. Every value is checked. A few
    rows are in memory at a time.

    shoal checkpoint export runs/tiny model.safetensors
    """

    directory: Directory
    """The directory of a run, of its checkpoints, or of one step; or the URL of checkpoints or a step."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """The file or folder to write."""

    format: Literal["safetensors", "huggingface", "dcp", "torch", "peft", "deepspeed"] = "safetensors"
    """safetensors: one file. huggingface: a folder with files, index and, of a llama, config.json. dcp: a folder of
    torch.distributed.checkpoint. torch: a state dict of torch.save. peft: a folder of adapters that PEFT loads.
    deepspeed: a folder whose weights DeepSpeed loads."""

    step: int | None = None
    """The step. None: the newest."""

    optimizer: bool = False
    """Also write the optimizer state."""

    shard_size: str = "5GB"
    """The largest file of a huggingface folder, unless one tensor is larger."""

    recipe: Path | None = None
    """The recipe with the model section for config.json. None: the recipe of the checkpoint, or of its run."""

    overwrite: bool = False
    """Replace an earlier export."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a checkpoint from files of other systems. `run.load` loads it on any layout. The import never executes code
    from the files.

    shoal checkpoint import meta-llama/ checkpoints/
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROM")]
    """A safetensors file, a folder of them, or a folder of torch.distributed.checkpoint, DeepSpeed or Megatron-LM."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """The directory to create."""

    format: Literal["auto", "safetensors", "huggingface", "dcp", "deepspeed", "megatron"] = "auto"
    """The format of the source. auto: by the names of its files."""

    step: int | None = None
    """The step number of the checkpoint. None: that of a checkpoint of DeepSpeed or Megatron-LM; else 0."""

    prefix: str = ""
    """A prefix of the weights' names, such as `model.`. Tensors without it are skipped."""

    vocabulary: int | None = None
    """The size of the vocabulary without the padding that Megatron-LM adds. None: the padding stays."""

    overwrite: bool = False
    """Replace an earlier import."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Write the whole model of a run with the updates of its LoRA added to its weights. The model is built in memory.

    shoal checkpoint merge runs/finetune merged
    """

    directory: Directory
    """The directory of a run, of its checkpoints, or of one step."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """The file or folder to write."""

    format: Literal["safetensors", "huggingface"] = "huggingface"
    """safetensors: one file. huggingface: a folder with files, index and, of a llama, config.json."""

    step: int | None = None
    """The step. None: the newest."""

    overwrite: bool = False
    """Replace an earlier export."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Run one action; returns the exit code."""
    action = pick("checkpoint", arguments, ABOUT)
    if action is None:
        return 0
    kind, act = ACTIONS[action]
    prog = f"shoal checkpoint {action}"
    options = parse_options(kind, arguments[1:], prog=prog)
    may_be_url = {getattr(options, name, None) for name in OF_URLS.get(action, ())}
    raise_if(
        Problem("R043", f"the path must be on this machine, got {word}", "copy the files to this machine first")
        for word in arguments[1:]
        if is_url(word) and word not in may_be_url
    )
    return act(options)


def _ls(options: Ls) -> int:
    found = listing(options.directory)
    _answer(
        options,
        lambda: report.of_listing(found, with_tensors=options.tensors),
        lambda console: report.draw_listing(console, options.directory, found, with_tensors=options.tensors),
    )
    return 0


def _verify(options: Verify) -> int:
    from shoal.checkpoint.verify import Damage, StepVerdict, verify

    if options.all and options.step is not None:
        raise ShoalError("--all and --step exclude each other", fix=f"--all, or --step {options.step}", code="R044")
    there = find_all(options.directory)
    folders = list(there) if options.all else [folder_at(options.directory, options.step)]
    verdicts: dict[Path, StepVerdict] = {}
    steps: list[SavedStep] = []
    for folder in folders:
        try:
            steps.append(there[folder]())
        except ShoalError as error:
            verdicts[folder] = StepVerdict(0, (Damage("manifest.json", error.problems[0].what),), ())
    with _progress_bar("verifying", sum(step.num_bytes for step in steps), options) as advance:
        verdicts |= {step.path: verify(step, advance) for step in steps}
    ordered = {folder: verdicts[folder] for folder in folders}
    _answer(
        options, lambda: report.of_verdicts(ordered), lambda console: report.draw_verdicts(console, ordered)
    )  # fmt: skip
    return 0 if all(verdict.is_intact for verdict in ordered.values()) else 1


def _diff(options: Diff) -> int:
    first, second = find(options.first), find(options.second)
    from shoal.checkpoint.diff import compare

    with _progress_bar("comparing", first.model_bytes if options.weights else first.num_bytes, options) as advance:
        found = compare(first, second, weights_only=options.weights, progress=advance)
    _answer(
        options,
        lambda: report.of_comparison(found),
        lambda console: report.draw_comparison(console, found, (first, second), top=options.top),
    )
    return 0 if found.is_equal else 1


def _export(options: Export) -> int:
    step = find(options.directory, options.step)
    shard_bytes = size_in_bytes(options.shard_size)
    from shoal.checkpoint.formats.export import ExportSettings, export, model_in

    model = _model_section(options, step) if options.format == "huggingface" else None
    settings = ExportSettings(
        format=options.format, optimizer=options.optimizer, shard_bytes=shard_bytes, overwrite=options.overwrite,
        model=model or model_in(step),
    )  # fmt: skip
    with _progress_bar("exporting", step.num_bytes if options.optimizer else step.model_bytes, options) as advance:
        exported = export(step, options.to, settings, advance)
    result = {
        "from": str(step.path), "step": step.manifest.step, "to": str(options.to), "format": options.format,
        "tensors": exported.tensors, "bytes": exported.num_bytes, "config": exported.config,
    }  # fmt: skip
    _answer(options, lambda: result, lambda console: report.draw_export(console, result))
    return 0


def _model_section(options: Export, step: SavedStep) -> Mapping[str, Any] | None:
    """The model section of `--recipe`, else of the recipe in the run directory. None: the checkpoint's own section is
    used."""
    beside = step.path.parent.parent / "recipe.yaml"
    is_here = step.disk.renames
    path = options.recipe or (
        beside if is_here and beside.is_file() and not step.manifest.state.get("recipe") else None
    )
    if path is None:
        return None
    from shoal.config.load import load_recipe

    return load_recipe(path).model.model_dump(mode="json")


def _import(options: Import) -> int:
    if options.step is not None and options.step < 0:
        raise ShoalError(f"--step must be 0 or more, got {options.step}", fix="--step 0", code="R045")
    from shoal.checkpoint.formats.import_ import ImportSettings, import_checkpoint, read

    settings = ImportSettings(
        format=options.format, step=options.step, prefix=options.prefix, vocabulary=options.vocabulary,
        overwrite=options.overwrite,
    )  # fmt: skip
    found = read(options.source, settings)
    with _progress_bar("importing", found.num_bytes, options) as advance:
        path = import_checkpoint(found, options.to, settings, advance)
    result = {
        "from": str(options.source), "format": found.format, "path": str(path), "step": found.step(settings),
        "tensors": len(found.model), "optimizer_states": len(found.states), "bytes": found.num_bytes,
        "skipped": list(found.left_out), "model": found.section,
    }  # fmt: skip
    _answer(options, lambda: result, lambda console: report.draw_import(console, result, options.to))
    return 0


def _merge(options: Merge) -> int:
    from shoal.checkpoint.formats.export import ExportSettings
    from shoal.train.inference.merge import write_merged

    settings = ExportSettings(format=options.format, overwrite=options.overwrite)
    step, exported = write_merged(Path(options.directory), options.step, options.to, settings)
    result = {
        "from": str(options.directory), "step": step, "to": str(options.to), "format": options.format,
        "tensors": exported.tensors, "bytes": exported.num_bytes, "config": exported.config,
    }  # fmt: skip
    _answer(options, lambda: result, lambda console: report.draw_export(console, result))
    return 0


OF_URLS = {"ls": ("directory",), "verify": ("directory",), "diff": ("first", "second"), "export": ("directory",)}
"""Action → the options that may be URLs."""

ACTIONS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "ls": (Ls, _ls),
    "verify": (Verify, _verify),
    "diff": (Diff, _diff),
    "export": (Export, _export),
    "import": (Import, _import),
    "merge": (Merge, _merge),
}


def _answer(options: Any, say: Callable[[], Mapping[str, Any]], draw: Callable[[Console], None]) -> None:
    if options.json:
        print(json.dumps(say(), allow_nan=False))
    else:
        show(draw, sys.stdout, width=WIDTH)


@contextmanager
def _progress_bar(title: str, total: int, options: Any) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal; yields the function that advances it by a number of bytes."""
    if options.json or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda size: progress.advance(task, size)
