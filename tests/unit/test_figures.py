"""Every figure in README and docs says when it was measured, and on which commit."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "decisions"),
]
COMMIT = r", [0-9a-f]{7}\b"
RESULT = re.compile(r"\]\((?:\.\./)*benchmarks/results/([^)]+\.md)\)")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")


def text_of(page: Path) -> str:
    """Without the table of what was tried where, whose dates are those of no figure."""
    return re.sub(r"(?m)^\| \| CPU, gloo \|.*\n(?:\|.*\n)+", "", page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figures_name_their_commit(page: Path) -> None:
    text = text_of(page)
    bare = RESULT.sub(lambda link: "]" + " " * (len(link[0]) - 1), text)  # a date in the name of a file is none
    for found in DATE.finditer(bare):
        line = text[: found.start()].count("\n") + 1
        rest = text[found.end() :]
        has_result = RESULT.search(text[found.start() : found.end() + 200].split("\n\n")[0])
        assert re.match(COMMIT, rest) or has_result, f"{page.name}:{line}: {found[0]} without a commit"
    for link in RESULT.finditer(text):
        named = re.match(COMMIT, text[link.end() :])
        assert named, f"{page.name}: {link[1]} without its commit"
        assert f"commit {named[0][2:]}" in (ROOT / "benchmarks" / "results" / link[1]).read_text(), link[1]


def newest(pattern: str) -> Path:
    """The result of this kind with the latest date."""
    return sorted((ROOT / "benchmarks" / "results").glob(pattern), key=lambda path: path.stem[-10:])[-1]


def test_figures_of_the_overhead_are_those_of_the_newest_result() -> None:
    result = newest("overhead_*.md")
    ratios = re.findall(r"\| (\d+ x \d+ tokens) \| ([\d.]+ ms) \| ([\d.]+ ms) \| ([\d.]+) \|", result.read_text())
    assert len(ratios) == 3
    readme = (ROOT / "README.md").read_text()
    for size, by_hand, ours, ratio in ratios:
        assert re.search(rf"{size}.*\| {by_hand} \| {ours} \| {ratio} \|", readme), (result.name, size)


def test_figures_of_the_gpu_are_those_of_the_newest_result() -> None:
    result = newest("h200-speed_*.md")
    rows = re.findall(
        r"^\| 1\.50 B \| ([^|]+) \| ([\d,]+) \| ([\d.]+) \| [^|]+ \| ([\d.]+) \|", result.read_text(), re.M
    )
    measured = {system: (tokens, float(ratio), memory) for system, tokens, ratio, memory in rows}
    readme = (ROOT / "README.md").read_text()
    assert result.name in readme
    shown = re.findall(r"^\| ([^|]+), bf16 \| ([\d,]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.M)
    assert len(shown) == 3
    for system, tokens, ratio, memory in shown:
        assert (tokens, float(ratio), memory) == measured[system], system


def test_commits_that_pages_name_exist() -> None:
    if (
        subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True).stdout
        != b"false\n"
    ):
        pytest.skip("the history of this clone does not reach back")
    named = {one[2:] for page in PAGES for one in re.findall(COMMIT, text_of(page))}
    missing = [
        one for one in named if subprocess.run(["git", "cat-file", "-e", f"{one}^{{commit}}"], cwd=ROOT).returncode
    ]
    assert not missing
