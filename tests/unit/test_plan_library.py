"""`shoal.plan(...)` answers what `shoal plan` prints, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import shoal
from shoal.planner.answer import to_mapping
from tests.rejects import rejects

WORDS = {"cluster": "h200:8", "seq_len": 8192, "global_batch": 64, "zero": 1}


def test_it_answers_what_the_command_prints() -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in WORDS.items()]
    command = [sys.executable, "-m", "shoal", "plan", "llama3-8b", *options, "--json"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert to_mapping(shoal.plan("llama3-8b", **WORDS)) == json.loads(printed)


def test_torch_stays_away() -> None:
    script = "import sys, shoal; shoal.plan('llama3-8b', cluster='h200:8', tp=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_unknown_argument_is_named_with_the_nearest() -> None:
    with rejects("Q025", "'clutser'"):
        shoal.plan("llama3-8b", clutser="h200:8")


def test_a_module_is_no_name_of_a_model() -> None:
    with rejects("Q029", "object"):
        shoal.plan(object(), cluster="h100:8")  # type: ignore[arg-type]
