"""`shoal doctor`: check this host, a recipe, several hosts or a run for the usual causes of failures."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shoal.cli.doctor.report import render, worst
from shoal.cli.options import parse_options, print_help
from shoal.cli.overrides import parse
from shoal.cli.reports.console import WIDTH, show
from shoal.config.load import RecipeReading
from shoal.doctor.bounded import run_checks
from shoal.doctor.finding import Finding, Level, by_severity
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.doctor.needs import Needs
    from shoal.launch.hosts.hostlist import HostSpec

OWN = ("--json", "--port", "--ssh")
"""Options that `shoal train` does not get."""


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this host for the usual causes of failed and slow runs; with a recipe, also against what its plan needs;
    with a run directory, which rank the others wait for. Nothing is changed. Exit code 1: something will fail.

    shoal doctor

    shoal doctor recipe.yaml --nproc 4

    shoal doctor --hosts a,b

    shoal doctor runs/tiny
    """

    recipe: Annotated[Path | None, tyro.conf.Positional] = None
    """A recipe, with any settings of `shoal train`; or the directory of a run. None: check the host alone."""

    hosts: str | None = None
    """Check the connections between these hosts as well: `a,b`, or `a:8,b:8`, or a file with a host a line."""

    ssh: str | None = None
    """The command that runs another one on {host}; also SHOAL_SSH. Default: ssh -o BatchMode=yes ... {host}."""

    port: int | None = None
    """A port that has to be free, such as the one of --listen."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""


def main(arguments: Sequence[str]) -> int:
    """Check, and print the findings; 0 if nothing will fail, else 1."""
    if "--help" in arguments or "-h" in arguments:  # without the settings of a recipe, which `shoal train` lists
        print_help(Doctor, prog="shoal doctor")
    began = time.perf_counter()
    run = _run_directory(arguments)
    if run is not None:
        as_json = parse_options(Doctor, arguments, prog="shoal doctor").json
        title, findings = f"run {run}", _check_run(run)
    else:
        options, reading = parse(Doctor, arguments, prog="shoal doctor")
        as_json = options.json
        title, findings = _check(options, reading, arguments)
    seconds = time.perf_counter() - began
    if as_json:
        rows = [each.as_mapping() for each in by_severity(findings)]
        print(json.dumps({"checked": title, "worst": worst(findings).value, "seconds": seconds, "findings": rows}))
    else:
        show(lambda console: render(console, title, findings, seconds), sys.stdout, width=WIDTH)
    return 1 if worst(findings) is Level.FAIL else 0


def _run_directory(arguments: Sequence[str]) -> Path | None:
    """The first argument, if it is a directory."""
    first = arguments[0] if arguments else "-"
    return Path(first) if not first.startswith("-") and os.path.isdir(first) else None


def _check_run(path: Path) -> list[Finding]:
    from shoal.doctor.live import check_run

    return check_run(path)


def _check(options: Doctor, reading: RecipeReading, arguments: Sequence[str]) -> tuple[str, list[Finding]]:
    from shoal.doctor.host import host_checks, port_of_environment

    recipe = reading.complete()
    if options.port is not None and not 0 < options.port < 65536:
        raise ShoalError(f"--port must be 1 to 65535, got {options.port}", fix="--port 29500", code="N101")
    hosts = _read_hosts(options, recipe.launch.nproc)
    has_recipe, needs = _has_recipe(options, arguments), None
    ports = [*([] if options.port is None else [options.port]), *port_of_environment()]
    if not has_recipe:
        findings = run_checks(list(host_checks(ports)))
    else:
        from shoal.doctor import needs as of_recipe
        from shoal.doctor.dry_run import DryRun

        dry_run = DryRun.start(_train_words(arguments))
        findings = run_checks(list(host_checks(ports)))
        answer = dry_run.answer()
        world_size = answer.ranks or recipe.launch.nproc or 1
        ranks = hosts[0].slots if hosts else world_size
        needs = of_recipe.Needs(recipe=recipe, ranks=ranks, world_size=world_size, predicted=answer.predicted)
        ours = run_checks(list(of_recipe.checks(needs)))
        findings = [*answer.findings, *ours, *_not_covered(findings, ours)]
        if options.recipe is not None:
            findings = [replace(each, fix=each.fix.replace("RECIPE", str(options.recipe))) for each in findings]
    if hosts:
        findings = _with_hosts(hosts, options, findings, needs)
    name = socket.gethostname()
    parts = [f"recipe {options.recipe or 'of the command line'}"] if has_recipe else []
    title = ", ".join([*parts, f"hosts {', '.join(each.name for each in hosts)}" if hosts else f"host {name}"])
    return title, findings


def _not_covered(of_host: Sequence[Finding], ours: Sequence[Finding]) -> list[Finding]:
    """The findings of the host, without those of which a check of the recipe has the same name and one as bad."""
    return [
        each
        for each in of_host
        if not any(own.check == each.check and by_severity([own, each])[0] is own for own in ours)
    ]


def _has_recipe(options: Doctor, arguments: Sequence[str]) -> bool:
    """Whether a recipe was given, or settings of one."""
    own = {f"--{name}" for name in Doctor.__dataclass_fields__}
    flags = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    return options.recipe is not None or any(flag not in own for flag in flags)


def _train_words(arguments: Sequence[str]) -> list[str]:
    """The words of `shoal train` with the same recipe and settings."""
    words, left = [], list(arguments)
    while left:
        word = left.pop(0)
        if word.partition("=")[0] not in OWN:
            words.append(word)
        elif word in ("--port", "--ssh"):
            del left[:1]
    return words


def _read_hosts(options: Doctor, nproc: int | None) -> list[HostSpec]:
    if options.hosts is None:
        return []
    from shoal.launch.hosts.hostlist import read_hosts

    return read_hosts(options.hosts, default_slots=nproc or 1)


def _with_hosts(hosts: list[HostSpec], options: Doctor, here: list[Finding], needs: Needs | None) -> list[Finding]:
    from shoal.doctor.hosts import check_hosts

    return [*check_hosts(hosts, options.ssh, needs), *here]
