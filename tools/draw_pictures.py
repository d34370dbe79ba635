"""Draw the pictures of README and docs with shoal's own code: `python tools/draw_pictures.py` writes docs/pictures.

tests/unit/test_pictures.py compares the committed files with what this script draws.
"""

from __future__ import annotations

import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

from shoal.blueprint.collectives import draw as collectives
from shoal.blueprint.collectives.steps import steps
from shoal.blueprint.layout import Layout
from shoal.blueprint.plan import Plan, Schedule
from shoal.blueprint.schedules import draw as schedules
from shoal.blueprint.schedules.schedule_orders import make_schedule
from shoal.blueprint.schedules.simulate import StageCost, simulate

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"

STYLE = """\
svg { --text: #1f2328; --line: #afb8c1; --node0: #ddf4ff; --node1: #fff8c5; --copy: #0969da; --add: #bc4c00; }
@media (prefers-color-scheme: dark) {
  svg { --text: #e6edf3; --line: #484f58; --node0: #0c2d6b; --node1: #4b2900; --copy: #58a6ff; --add: #f0883e; }
}
text { font-family: ui-sans-serif, system-ui, sans-serif; } text:not([fill]) { fill: var(--text); }"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text)


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    return {
        "1f1b.svg": schedule("1f1b", v=1),
        "zbv.svg": schedule("zbv", v=2),
        "layout.svg": layout(Plan.parse("pp=2 dp_shard=2 tp=2").resolve(8).layout, devices_per_node=4),
        "ring.svg": ring(num_ranks=4),
        **badges(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]),
    }


def badges(project: dict[str, Any]) -> dict[str, str]:
    """The versions that pyproject.toml and constraints.txt name."""
    pythons = re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))
    [oldest] = (found[1] for line in project["dependencies"] if (found := re.fullmatch(r"torch>=(.+)", line)))
    [newest] = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {
        "badge-python.svg": badge("python", " | ".join(pythons)),
        "badge-torch.svg": badge("torch", f"{oldest} to {newest}"),
        "badge-licence.svg": badge("licence", project["license"]),
    }


def badge(name: str, value: str) -> str:
    """A name on grey and a value on blue, white on both in either mode."""
    left, right = 14 + 7 * len(name), 14 + 7 * len(value)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">',
            f"<title>{name}: {value}</title>",
            f'<rect width="{left + right}" height="20" rx="3" fill="#57606a"/>',
            f'<path d="M{left},0 h{right - 3} a3,3 0 0 1 3,3 v14 a3,3 0 0 1 -3,3 h-{right - 3} z" fill="#0969da"/>',
            '<g fill="#fff" font-family="ui-sans-serif, system-ui, sans-serif" font-size="12" text-anchor="middle">',
            f'<text x="{left / 2:g}" y="14">{name}</text><text x="{left + right / 2:g}" y="14">{value}</text>',
            "</g></svg>",
            "",
        ]
    )


def schedule(word: Schedule, v: int) -> str:
    """4 ranks, 8 microbatches; forward, input gradient and weight gradient of a rank take equally long."""
    part = StageCost(forward=1 / v, input_grad=1 / v, weight_grad=1 / v)
    table = make_schedule(word, num_ranks=4, v=v, num_microbatches=8)
    return schedules.svg(simulate(table, part), f"{word}, 4 ranks, 8 microbatches")


def ring(num_ranks: int) -> str:
    """A ring all-reduce, in colours that follow the light or dark mode."""
    drawn = collectives.svg(steps("all_reduce", "ring", num_ranks, size=100 * num_ranks))
    themed = drawn.replace("#bbb", "var(--line)").replace("#c2410c", "var(--add)").replace("#1d4ed8", "var(--copy)")
    head, _, body = themed.partition("\n")
    return f"{head}\n<style>\n{STYLE}\n</style>\n{body}"


def layout(of: Layout, devices_per_node: int, box: int = 46) -> str:
    """A panel per pipeline stage, `dp_shard` down and `tp` to the right, a colour per node."""
    panel = (of.tp + 2) * box
    parts = []
    for pp, down, right in product(range(of.pp), range(of.dp_shard), range(of.tp)):
        rank = of.rank(pp=pp, dp_shard=down, tp=right)
        x, y = 70 + pp * panel + right * box, 40 + down * box
        colour = f"var(--node{rank // devices_per_node})"
        parts.append(f'<rect x="{x}" y="{y}" width="{box}" height="{box}" fill="{colour}" stroke="var(--line)"/>')
        parts.append(f'<text x="{x + box / 2:g}" y="{y + 28}" text-anchor="middle">{rank}</text>')
        if down == right == 0:
            parts.append(f'<text x="{x}" y="14" font-weight="bold">pp {pp}, node {rank // devices_per_node}</text>')
            parts.append(f'<text x="{x}" y="33" font-size="11">tp \N{RIGHTWARDS ARROW}</text>')
            parts.append(
                f'<text x="{x - 6}" y="{y + 28}" font-size="11" text-anchor="end">dp_shard \N{DOWNWARDS ARROW}</text>'
            )
    height = 50 + of.dp_shard * box
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {of.pp * panel} {height}" font-size="14" role="img">'
    return "\n".join([head, f"<style>\n{STYLE}\n</style>", *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
