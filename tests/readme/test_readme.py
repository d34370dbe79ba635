"""What README and docs say is true: every command runs, every block of Python too, every link and file is there."""

from __future__ import annotations

import contextlib
import doctest
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal.config.duration import UNITS, Duration
from tests.cli.test_launchers import OF_TWO
from tests.readme.fork_host import ROOT, Ran, run_commands
from tests.warm import warm_python

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w/.-])(?:src|tests|recipes|docs|examples|benchmarks|tools)/[\w./-]*\w")

# Data that is made up on the spot, short samples, three steps (one to verify): a command is proven, not a training.
QUICK = ["--data.source", "synthetic", "--data.seq_len", "32"]
FAST = [*QUICK, "--run.fast_dev_run", "true"]

# Commands that this machine cannot run, by the comment that says so, and what is done instead: all that comes before
# the first process is started, on the number of ranks that the command would have.
NEEDS: dict[str, tuple[str, list[str]]] = {
    "needs a GPU": ("CI has none", ["--dry-run"]),
    "needs two nodes": ("CI has one machine", ["--dry-run", "--nproc", "16"]),
    "needs Slurm": ("CI has no cluster", ["--dry-run", "--nproc", "16"]),
}
# A matrix takes minutes: on one rank it is the same command with one layout.
SHORTER = {"takes minutes": ["--nproc", "1"]}
WRONG = "train recipes/tiny.yaml --optim.learning_rate 1e-3 --data.global_batch -1 --plan tp=3 --nproc 4"


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    text: str

    @property
    def is_script(self) -> bool:
        return self.language == "python" and "shoal.verify(" in self.text and not self.text.startswith(">>>")


@dataclass(frozen=True)
class Command:
    text: str
    comment: str
    page: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    @property
    def words(self) -> list[str]:
        """For the verb: without the launcher before it and a redirection behind it."""
        words = shlex.split(self.text.partition(" > ")[0])
        words = words[words.index("shoal") + 1 :]
        needs = next((instead for mark, (_, instead) in NEEDS.items() if mark in self.comment), [])
        if words[0] == "verify" and "--steps" not in words:
            words += ["--steps", "1"]
            if self.text not in SHOWN.values():  # where the page shows the bytes, they are those of a whole batch
                words += ["--data.global_batch", "8"]
        if words[:2] == ["bench", "comm"]:  # a minute, of which a few seconds prove the command
            words += ["--seconds", "2", "--sizes", "1KB", "16KB"]
        if words[0] == "train":
            words += needs + (QUICK if "--dry-run" in [*words, *needs] else FAST)
        return words + next((instead for mark, instead in SHORTER.items() if mark in self.comment), [])


def blocks_of(page: Path) -> list[Block]:
    return [Block(page, language, text) for language, text in FENCE.findall(page.read_text())]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def shown_by(page: str) -> tuple[str, str]:
    """The first command of a page that proves a plan and whose output stands there, with that output."""
    return next(
        (asked.text.strip(), answer.text)
        for asked, answer in itertools.pairwise(blocks_of(ROOT / page))
        if asked.text.startswith("shoal verify") and answer.language == "text"
    )


SHOWN = {page: shown_by(page)[0] for page in ("README.md", "docs/verify.md")}


def commands() -> list[Command]:
    found: dict[str, Command] = {}
    for block in BLOCKS:
        for line in block.text.splitlines() if block.language == "bash" else ():
            text, _, comment = line.partition("  #" if "  #" in line else "    #")
            if text.strip():
                found.setdefault(text.strip(), Command(text.strip(), comment.strip(), block.page.name))
    return list(found.values())


COMMANDS = commands()
OF_SHOAL = [c for c in COMMANDS if "shoal" in shlex.split(c.text)]
OTHERS = [c for c in COMMANDS if c not in OF_SHOAL]


def is_in_short(command: Command) -> bool:
    """Does `make test` run it? Those of the README, those whose output is looked at, and those that train nothing."""
    is_cheap = command.words[0] in ("plan", "schema", "explain", "checkpoint") or "--dry-run" in command.words
    return command.page == "README.md" or command.text in SHOWN.values() or "--json" in command.words or is_cheap


ASKED = OF_SHOAL if os.environ.get("SHOAL_ALL") else [c for c in OF_SHOAL if is_in_short(c)]

pytestmark = pytest.mark.timeout(300)  # the first test that asks for `ran` waits for all commands of all pages


def run_all() -> tuple[dict[str, Ran], list[dict[str, Any]]]:
    """All commands that are asked for; and two more, the wrong one and one whose metrics are looked at, with them."""
    todo = {command.text: command.words for command in ASKED}
    todo["wrong"] = shlex.split(WRONG)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "kept")
        short = ["--run.duration", "1step", "--data.synthetic_samples", "64", "--run.dir", str(kept), "--json"]
        todo["kept"] = ["train", "recipes/resnet-synthetic.yaml", *short]
        unlike = {tuple(words): words for words in todo.values()}  # what tells two commands apart may be left out here
        found = dict(zip(unlike, run_commands(list(unlike.values()), timeout=280), strict=True))
        metrics = kept / "metrics.jsonl"
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {text: found[tuple(words)] for text, words in todo.items()}, records


def run_scripts() -> dict[str, Ran]:
    """The blocks of Python that start ranks, each a script of its own: only a fresh process can be forked."""
    found = {}
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        for block in BLOCKS:
            if block.is_script:
                script.write_text(block.text)
                command = [warm_python(), str(script)]
                ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=90, check=False)
                found[block.text] = Ran(ended.returncode, ended.stdout, ended.stderr)
    return found


@pytest.fixture(scope="module")
def ran(once: Callable[..., Any]) -> dict[str, Ran]:
    outcomes: dict[str, Ran] = once(run_all)[0]
    return outcomes


@pytest.mark.parametrize("command", ASKED, ids=str)
def test_a_command_runs(command: Command, ran: dict[str, Ran]) -> None:
    outcome = ran[command.text]
    assert outcome.code == 0, outcome.stderr
    if " > " in command.text:  # the file is what the command would write
        file = ROOT / command.text.partition(" > ")[2]
        assert file.read_text() == outcome.stdout, f"out of date: {command.text}"


@pytest.mark.parametrize("command", OTHERS, ids=str)
def test_another_command_runs(command: Command) -> None:
    """A target of make is only asked for; an example has a test of its own; CI installs as pip is told to here."""
    words = shlex.split(command.text)
    assert words[0] in ("make", "python", "pip"), f"who runs {words[0]}?"
    if words[0] == "pip":
        [extras] = re.fullmatch(r"pip install -e \.(?:\[([\w,]+)\])?", " ".join(words)).groups()  # type: ignore[union-attr]
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras.split(",") if extras else ()) <= set(project["optional-dependencies"])
        return
    if words[0] == "make":
        asked = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
        assert asked.returncode == 0, asked.stderr
    else:
        assert (ROOT / words[1]).parent.name == "examples"
        assert (ROOT / words[1]).is_file()


def test_torchrun_starts_it_as_a_test_does() -> None:
    """In tests/cli/test_launchers.py it runs, and computes what `shoal train --nproc 2` does."""
    command = next(c for c in OF_SHOAL if c.text.startswith("torchrun") and not c.comment)
    _, *before = shlex.split(command.text.partition(" train ")[0])
    assert before == [*OF_TWO, "-m", "shoal"]


def test_what_cannot_run_here_says_so() -> None:
    for command in OF_SHOAL:
        is_elsewhere = re.match(r"srun|torchrun --nnodes", command.text) or re.search(
            r"gpu(?!s 0\b)|cuda", command.text
        )
        assert bool(is_elsewhere) == any(mark in command.comment for mark in NEEDS), command


def test_mistakes_come_in_one_list_as_shown(ran: dict[str, Ran]) -> None:
    assert ran["wrong"].code == 2
    shown = next(block.text for block in BLOCKS if block.text.startswith("shoal: bad input"))
    assert shown == ran["wrong"].stderr
    assert WRONG in " ".join((ROOT / "docs" / "recipes.md").read_text().split())


def test_python_prints_what_is_shown(once: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a block of text follows, that is all that is printed; else it only has to run."""
    monkeypatch.chdir(tmp_path)
    number = 0
    for block, following in zip(BLOCKS, [*BLOCKS[1:], None], strict=True):
        if block.language == "python":
            number += 1
            printed = run_python(block, once)
            if following is not None and (following.language, following.page) == ("text", block.page):
                assert printed == following.text
    assert number


def run_python(block: Block, once: Callable[..., Any]) -> str:
    """What it prints."""
    if block.text.startswith(">>>"):
        found = doctest.DocTestParser().get_doctest(block.text, {}, block.page.name, None, None)
        assert doctest.DocTestRunner().run(found).failed == 0
        return ""
    if block.is_script:
        ran: Ran = once(run_scripts)[block.text]
        assert ran.code == 0, ran.stderr[-3000:]
        return ran.stdout
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block.text, block.page.name, "exec"), {})
    return printed.getvalue()


@pytest.mark.parametrize("page", SHOWN)
def test_verify_prints_what_is_shown(page: str, ran: dict[str, Ran]) -> None:
    """All but what is measured and what is rounding: the verdict, and what was predicted and counted."""
    command, shown = shown_by(page)
    assert facts_in(shown) == facts_in(ran[command].stdout)
    assert len(facts_in(shown)) >= 10


def facts_in(text: str) -> list[list[str]]:
    """The words of every line that is the same on every machine."""
    lines = [line.split() for line in text.splitlines()]
    first_words = ("equal", "pp", "tp", "send", "all_gather", "all_reduce", "reduce_scatter", "bytes")
    return [words for words in lines if words and words[0] in (*first_words, "parameters", "gradients", "optimizer")]


def test_every_key_of_a_proof_is_documented_and_no_other(ran: dict[str, Ran]) -> None:
    table = (ROOT / "docs" / "verify.md").read_text().split("## As JSON")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` (.*)", table, re.MULTILINE))
    command = next(c for c in OF_SHOAL if "verify" in c.words and "--json" in c.words)
    proof = json.loads(ran[command.text].stdout)
    assert list(proof) == list(rows)
    for key in ("worst", "memory"):
        assert set(proof[key]) <= set(re.findall(r"`(\w+)`", rows[key])), key


def test_the_diff_gives_the_losses_that_it_had_before() -> None:
    """The loop before and after, on the same samples in the same order."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    [diff] = [block.text for block in BLOCKS if block.language == "diff" and block.page.name == "README.md"]
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(96, 6, generator=generator), torch.randint(0, 4, (96,), generator=generator))

    def classifier() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(6, 4)

    def in_order(dataset: Any, *, batch_size: int, shuffle: bool) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=batch_size)

    losses = []
    for sign in "-+":
        names = {"torch": torch, "F": F, "DataLoader": in_order, "Classifier": classifier, "dataset": dataset}
        code = "\n".join(line[1:] for line in diff.splitlines() if line[0] in (" ", sign))
        exec(compile(code, f"README.md ({sign})", "exec"), names)
        losses.append(names["loss"].item())  # type: ignore[attr-defined]
        if sign == "+":
            names["run"].close()  # type: ignore[attr-defined]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")).lower().replace(" ", "-") for line in text.splitlines()}
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if not link.startswith("http"):
            assert (page.parent / path).exists(), f"{page.name}: {link}"
            assert not anchor or path or anchor in headings, f"{page.name}: {link}"
    for name in FILE.findall(re.sub(r"\]\([^)]*\)", "]", text)):
        if "x" not in Path(name).stem.split("_"):  # tests/unit/test_x.py stands for any
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop().resolve()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
            todo += [page.parent / link for link in links if not link.startswith("http")]
    assert set(PAGES) <= seen


def test_the_tour_counts_lines() -> None:
    rows = re.findall(r"\| \[.*?\]\((.*?)\) \| (\d+) \|", (ROOT / "docs" / "tour.md").read_text())
    assert len(rows) == 8
    for link, said in rows:
        counted = len((ROOT / "docs" / link).read_text().splitlines())
        assert abs(counted - int(said)) <= counted / 10, f"{link} has {counted} lines, docs/tour.md says {said}"


TOPICS = (
    "gradient compression", "DiLoCo", "autosave", "1F1B table", "fused loss", "memory prediction", "hang timeout",
    "Slurm", "activation checkpointing", "fp8",
)  # fmt: skip


def test_the_tour_says_where_things_are() -> None:
    rows = re.findall(r"^\| ([^|]+) \| .*\]\(\.\./src/", (ROOT / "docs" / "tour.md").read_text(), re.MULTILINE)
    assert [topic for topic in TOPICS if not any(topic in row for row in rows)] == []


def test_the_drawn_layers_are_those_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract.get("containers") == ["shoal"])
    page = ROOT / "docs" / "decisions"
    [rooms] = [block.text for block in blocks_of(page / "0021-rooms.md") if block.text.startswith("cli")]
    assert [line.split("  ")[0] for line in rooms.splitlines()] == layers
    [drawn] = [block.text for block in blocks_of(page / "0001-paper-and-machine.md") if "errors" in block.text]
    words = re.sub(r"^(paper, no torch|machine)", "", drawn, flags=re.MULTILINE)
    assert [" ".join(layer.split()) for layer in words.split("\N{RIGHTWARDS ARROW}")] == layers[::-1]


def test_every_metric_is_documented_and_no_other(once: Callable[..., Any]) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    of_steps, of_summary = page.split("## summary.json")
    ran, records = once(run_all)
    assert ran["kept"].code == 0, ran["kept"].stderr
    assert {key for record in records for key in record} == set(re.findall(r"^\| `(\w+)`", of_steps, re.MULTILINE))
    summary = json.loads(ran["kept"].stdout)
    assert list(summary) == re.findall(r"^\| `(\w+)`", of_summary, re.MULTILINE)


def test_every_duration_is_documented() -> None:
    table = (ROOT / "docs" / "recipes.md").read_text().split("## Durations")[1].split("## In your editor")[0]
    spelled = re.findall(r"`([\de.]+[a-z]*)`", table)
    assert {Duration.parse(text).unit for text in spelled} == set(UNITS)


def test_the_plan_of_the_readme_is_the_one_that_is_printed(ran: dict[str, Ran]) -> None:
    command = next(c.text for c in OF_SHOAL if c.text.startswith("shoal plan llama3-8b"))
    shown = next(block.text for block in blocks_of(ROOT / "README.md") if "all numbers predicted" in block.text)
    printed = {" ".join(line.split()) for line in ran[command].stdout.splitlines()}
    said = [" ".join(line.split()) for line in shown.splitlines()]
    assert [line for line in said if line != "[...]" and line not in printed] == []
