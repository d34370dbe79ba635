"""`shoal checkpoint ls | verify | diff | export | import`: look at checkpoints, prove them, take them elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shoal.checkpoint.storage.locate import SavedStep, find, folder_of, folders_of, listing, read_manifest
from shoal.cli.console import WIDTH, show
from shoal.cli.parse_units import size_in_bytes
from shoal.cli.reports import checkpoint as report
from shoal.errors import Problem, ShoalError, nearest, raise_if

if TYPE_CHECKING:
    from rich.console import Console

Directory = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIRECTORY")]

ABOUT = {
    "ls": "list what there is: steps, sizes, plans, tensors; drafts and what is damaged",
    "verify": "read every byte and hold it against what was written",
    "diff": "compare two steps tensor by tensor, whichever layouts have written them",
    "export": "write a step as safetensors, for Hugging Face, for torch.distributed.checkpoint or torch.load",
    "import": "make a checkpoint of safetensors, of a folder of Hugging Face or of torch.distributed.checkpoint",
}


@dataclass(frozen=True, kw_only=True)
class Ls:
    """List the checkpoints of a directory: what they hold, what wrote them, and what is not whole. Files are looked at,
    and not read: `shoal checkpoint verify` reads them.

    shoal checkpoint ls runs/tiny
    """

    directory: Directory
    """Of a run, of its checkpoints, or of one step."""

    tensors: bool = False
    """List the tensors of each, too."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Read every byte of a checkpoint and hold it against what was written. Exit code 0: whole, 1: damaged.

    shoal checkpoint verify runs/tiny --all
    """

    directory: Directory
    """Of a run, of its checkpoints, or of one step."""

    step: int | None = None
    """Which one. None: the newest."""

    all: bool = False
    """All of them."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Compare two checkpoints tensor by tensor, whichever layouts have written them. Exit code 0: the tensors are
    equal, 1: they are not. What else they say is shown, and does not count.

    shoal checkpoint diff runs/a/checkpoints/step-00000100 runs/b/checkpoints/step-00000100
    """

    first: Directory
    """One of them: the directory of a step, or one that holds steps, of which the newest is meant."""

    second: Directory
    """The other one."""

    weights: bool = False
    """Leave the states of the optimizer out."""

    top: int = 20
    """Tensors to show."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a checkpoint in a form that others read, whole tensors under the names that the model gives them. Every
    value is checked on the way; memory for a few rows is enough.

    shoal checkpoint export runs/tiny model.safetensors
    """

    directory: Directory
    """Of a run, of its checkpoints, or of one step."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """The file or folder to write."""

    format: Literal["safetensors", "huggingface", "dcp", "torch"] = "safetensors"
    """safetensors: one file. huggingface: a folder with files, index and, of a llama, config.json. dcp: a folder of
    torch.distributed.checkpoint. torch: a state dict of torch.save."""

    step: int | None = None
    """Which one. None: the newest."""

    optimizer: bool = False
    """Write what the optimizer keeps, too."""

    shard_size: str = "5GB"
    """The most that one file of a huggingface folder holds, if a tensor is not larger."""

    recipe: Path | None = None
    """The recipe that says what the model is, for config.json. None: that of the checkpoint, or of its run."""

    overwrite: bool = False
    """Replace an earlier export."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Make a checkpoint of what others have written, which `run.load` takes on any layout. Whatever the files hold, no
    code of a stranger's runs.

    shoal checkpoint import meta-llama/ checkpoints/
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FROM")]
    """A safetensors file, a folder of them, or a folder of torch.distributed.checkpoint."""

    to: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="TO")]
    """The directory to make."""

    format: Literal["auto", "safetensors", "huggingface", "dcp"] = "auto"
    """What the source is. auto: told from the names of its files."""

    step: int = 0
    """The step that it is to count as."""

    prefix: str = ""
    """What stands before the names of the weights there, such as `model.`; tensors without it are left out."""

    overwrite: bool = False
    """Replace an earlier import."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Do one of the actions; returns the exit code."""
    action = arguments[0] if arguments else "--help"
    if action in ("-h", "--help"):
        print(_help(), end="")
        return 0
    if action not in ACTIONS:
        near = nearest(action, ACTIONS)
        raise ShoalError(
            f"there is no shoal checkpoint {action!r}",
            fix=f"shoal checkpoint {near}" if near else f"shoal checkpoint {' | '.join(ACTIONS)}",
        )
    kind, act = ACTIONS[action]
    prog = f"shoal checkpoint {action}"
    options = tyro.cli(kind, args=list(arguments[1:]), prog=prog, config=(tyro.conf.FlagCreatePairsOff,))
    raise_if(
        Problem(f"{word} is a URL, and these commands work on this machine's files", "copy it here first, or from here")
        for word in arguments[1:]
        if "://" in word
    )
    return act(options)


def _help() -> str:
    lines = [f"  {name:<6}  {about}" for name, about in ABOUT.items()]
    usage = "usage: shoal checkpoint ACTION [options]"
    end = "`shoal checkpoint ACTION --help` lists the options of an action; all take --json."
    return "\n".join([usage, "", *lines, "", end, ""])


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
        raise ShoalError("--all means every step, and --step one of them", fix="leave one of them out")
    path = options.directory
    folders = folders_of(path) if options.all else [folder_of(path, options.step)]
    verdicts: dict[Path, StepVerdict] = {}
    steps: list[SavedStep] = []
    for folder in folders:
        try:
            steps.append(SavedStep(folder, read_manifest(folder)))
        except ShoalError as error:
            verdicts[folder] = StepVerdict(0, (Damage("manifest.json", error.problems[0].what),), ())
    with _watched("verifying", sum(step.num_bytes for step in steps), options) as tell:
        verdicts |= {step.path: verify(step, tell) for step in steps}
    ordered = {folder: verdicts[folder] for folder in folders}
    _answer(
        options, lambda: report.of_verdicts(ordered), lambda console: report.draw_verdicts(console, ordered)
    )  # fmt: skip
    return 0 if all(verdict.is_intact for verdict in ordered.values()) else 1


def _diff(options: Diff) -> int:
    first, second = find(options.first), find(options.second)
    from shoal.checkpoint.diff import compare

    with _watched("comparing", first.model_bytes if options.weights else first.num_bytes, options) as tell:
        found = compare(first, second, weights_only=options.weights, progress=tell)
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
    how = ExportSettings(
        format=options.format, optimizer=options.optimizer, shard_bytes=shard_bytes, overwrite=options.overwrite,
        model=model or model_in(step),
    )  # fmt: skip
    with _watched("exporting", step.num_bytes if options.optimizer else step.model_bytes, options) as tell:
        done = export(step, options.to, how, tell)
    said = {
        "from": str(step.path), "step": step.manifest.step, "to": str(options.to), "format": options.format,
        "tensors": done.tensors, "bytes": done.num_bytes, "config": done.config,
    }  # fmt: skip
    _answer(options, lambda: said, lambda console: report.draw_export(console, said))
    return 0


def _model_section(options: Export, step: SavedStep) -> Mapping[str, Any] | None:
    """What the model is, by the recipe that is named, else by the one that lies in the directory of the run. None: ask
    the checkpoint."""
    beside = step.path.parent.parent / "recipe.yaml"
    path = options.recipe or (beside if beside.is_file() and not step.manifest.state.get("recipe") else None)
    if path is None:
        return None
    from shoal.config.load import load_recipe

    return load_recipe(path).model.model_dump(mode="json")


def _import(options: Import) -> int:
    if options.step < 0:
        raise ShoalError(f"--step {options.step} is below 0", fix="--step 0 or more")
    from shoal.checkpoint.formats.import_ import ImportSettings, import_checkpoint, read

    how = ImportSettings(format=options.format, step=options.step, prefix=options.prefix, overwrite=options.overwrite)
    found = read(options.source, how)
    with _watched("importing", found.num_bytes, options) as tell:
        path = import_checkpoint(found, options.to, how, tell)
    said = {
        "from": str(options.source), "format": found.format, "path": str(path), "step": options.step,
        "tensors": len(found.model), "states": len(found.states), "bytes": found.num_bytes,
        "left_out": list(found.left_out), "model": found.section,
    }  # fmt: skip
    _answer(options, lambda: said, lambda console: report.draw_import(console, said, options.to))
    return 0


ACTIONS: dict[str, tuple[type[Any], Callable[[Any], int]]] = {
    "ls": (Ls, _ls),
    "verify": (Verify, _verify),
    "diff": (Diff, _diff),
    "export": (Export, _export),
    "import": (Import, _import),
}


def _answer(options: Any, say: Callable[[], Mapping[str, Any]], draw: Callable[[Console], None]) -> None:
    if options.json:
        print(json.dumps(say(), allow_nan=False))
    else:
        show(draw, sys.stdout, width=WIDTH)


@contextmanager
def _watched(title: str, total: int, options: Any) -> Iterator[Callable[[int], None]]:
    """Who hears how many bytes are done: a bar on a terminal, and nobody elsewhere."""
    if options.json or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda size: progress.advance(task, size)
