"""`shoal launch skypilot RECIPE` and `shoal launch dstack RECIPE`: print a file for a tool that rents machines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal.cli.jobs.request import JobOptions, check_no_requeues, checked_request, read_options
from shoal.errors import Problem
from shoal.jobs.clouds import check_memory, dstack, skypilot
from shoal.jobs.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class Cloud(JobOptions):
    """Write a file for SkyPilot or dstack, which rent machines, start a recipe on all of them, and start it again after
    machines were lost. SkyPilot copies the working directory, dstack the recipe.

    shoal launch skypilot recipes/tiny.yaml --nodes 2 --gpus 8 --accelerator H100 > job.yaml
    """

    accelerator: str | None = None
    """The kind of GPU, such as H100."""

    image: str | None = None
    """The image of a container. None: the machine's own system, with a --setup that installs shoal."""


def main_skypilot(arguments: Sequence[str]) -> int:
    """Print a task of SkyPilot."""
    return _print(arguments, skypilot, "shoal launch skypilot", "sky")


def main_dstack(arguments: Sequence[str]) -> int:
    """Print a task of dstack."""
    return _print(arguments, dstack, "shoal launch dstack", "dstack")


def _print(arguments: Sequence[str], render: Callable[[JobSpec, str | None], str], prog: str, program: str) -> int:
    options, reading = read_options(Cloud, arguments, prog=prog)
    request = checked_request(
        options,
        reading,
        arguments,
        prog=prog,
        problems=list(_check(options, prog, program)),
        image=options.image,
        stop_before=0,
    )
    text = render(request.spec, options.accelerator)
    print(json.dumps({"file": text}) if options.json else text, end="")
    return 0


def _check(options: Cloud, prog: str, program: str) -> Iterator[Problem]:
    if options.submit:
        what = f"{prog} writes a file, and does not submit it"
        yield Problem("J026", what, f"{prog} ... > job.yaml, and the command in its first line ({program})")
    if options.gpus and options.accelerator is None:
        yield Problem("J027", f"{prog} needs --accelerator, the kind of GPU", "--accelerator H100")
    if program == "sky" and options.time is not None:
        what = f"--time has no effect on {prog}: a task of SkyPilot has no time limit"
        yield Problem("J009", what, "leave it out, and --run.duration 2h; or shoal launch dstack")
    yield from check_memory(options.memory)
    yield from check_no_requeues(options, prog)
