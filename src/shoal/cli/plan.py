"""`shoal plan MODEL --cluster h100:8x4`: rank the plans that fit by predicted time."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shoal.cli.options import parse_options
from shoal.cli.reports.console import WIDTH, show
from shoal.planner.request import PlanRequest

if TYPE_CHECKING:
    from shoal.config.deepspeed.translation import Line
    from shoal.planner.search import Candidate


@dataclass(frozen=True, kw_only=True)
class Options(PlanRequest):
    """Rank the plans that fit a model on a cluster, with the reasons for the first. Nothing runs: every number is
    predicted.

    shoal plan llama3-8b --cluster h200:8 --seq-len 8192 --global-batch 64
    """

    model: Annotated[str | None, tyro.conf.Positional] = None
    """A preset (llama3-8b, mixtral-8x7b, ...), a Hugging Face config.json, hf:FOLDER, or file.py:function. None: the
    dimensions below."""

    deepspeed: Path | None = None
    """A ds_config.json of DeepSpeed, whose parallelism, batch and precision every plan must have."""

    megatron: str | None = None
    """Arguments of Megatron-LM, such as "--tensor-model-parallel-size 2 --bf16", which every plan must have; sizes of
    the model and the batch are taken over, too."""

    form: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """What --megatron says of the model beside its dimensions."""

    json: bool = False
    """Print one JSON object and nothing else on stdout."""

    html: Path | None = None
    """Write a page as well: memory against time of all plans that fit, the first one's layout, and the reasons."""


def main(arguments: Sequence[str]) -> int:
    """Print the plans; return 0 if one fits, else 1."""
    options = parse_options(Options, _with_quoted(arguments), prog="shoal plan")
    translated: list[Line] = []
    if options.deepspeed is not None or options.megatron is not None:
        from shoal.cli.other_systems.in_plan import with_translation

        options, translated = with_translation(options, arguments)
    from shoal.cli.reports.plan import render
    from shoal.planner.answer import answer, to_mapping

    seen: list[Candidate] | None = None if options.html is None else []
    found = answer(options, seen)
    if options.html is not None:
        from shoal.pages.plan.page import plan_page
        from shoal.pages.report import write_page

        write_page(options.html, plan_page(found, seen or ()), "--html")
    if options.json:
        both = {
            **to_mapping(found),
            **({"translated": [line.to_mapping() for line in translated]} if translated else {}),
        }
        print(json.dumps(both, allow_nan=False))
    else:
        show(lambda console: render(console, found), sys.stdout, width=WIDTH)
    return 0 if found.best else 1


def _with_quoted(arguments: Sequence[str]) -> list[str]:
    """The words, with the value of `--megatron`, which begins with dashes, joined to it.

    >>> _with_quoted(["llama3-8b", "--megatron", "--bf16 --seq-length 4096", "--json"])
    ['llama3-8b', '--megatron=--bf16 --seq-length 4096', '--json']
    """
    words = list(arguments)
    if "--megatron" in words[:-1]:
        place = words.index("--megatron")
        words[place : place + 2] = [f"--megatron={words[place + 1]}"]
    return words
