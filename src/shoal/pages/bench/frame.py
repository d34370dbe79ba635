"""The frame of a benchmark's page: its name, the verdict, and the machine. It has no script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.pages.html import ASSETS, page, section, table, text
from shoal.pages.words import figure, times
from shoal.version import __version__

Found = Mapping[str, Any]


def bench_page(name: str, title: str, found: Found, parts: Iterable[str]) -> str:
    """The whole page. `title` is escaped here; `parts` are HTML."""
    made = f"{found.get('date', '')}, shoal {__version__}, torch {found.get('torch', '')}"
    head = (
        f'<header><p class="brand">shoal bench {text(name)}</p><h1><bdi>{text(title, 80)}</bdi></h1>'
        f'<p class="made">{text(made)}</p></header>'
    )
    style = f"<style>{(ASSETS / 'bench.css').read_text(encoding='utf-8')}</style>"
    return page(f"{title[:80]} – shoal bench {name}", style + head + "".join(parts))


def verdict(headline: str, lines: Sequence[str], facts: Sequence[tuple[str, str, str]], *, is_good: bool = True) -> str:
    """The card at the top: one sentence, further ones, and figures with a remark each."""
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{text(value)}</dd><dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in facts
    )
    more = "".join(f'<p class="reason">{text(line)}</p>' for line in lines if line)
    state = "finished" if is_good else "dead"
    return (
        f'<section class="verdict {state}"><p class="headline"><span class="dot"></span>{text(headline)}</p>{more}'
        f'<dl class="facts">{cards}</dl></section>'
    )


def machine(found: Found) -> str:
    """The machine, and how busy it was."""
    cluster = found.get("cluster", {})
    rows = [
        ("host", found.get("host", "–")),
        ("cores, threads of a rank", f"{found.get('cores', '–')}, {found.get('threads', '–')}"),
        ("load before, after", f"{figure(found.get('load_before'), 3)}, {figure(found.get('load_after'), 3)}"),
        ("steps, rounds", f"{found.get('steps', '–')} timed, in {times(found.get('rounds'), 'round')}"),
        *([("left out", f"{found['warmup_steps']} first steps of every turn")] if "warmup_steps" in found else []),
        ("predictions", f"{cluster.get('source', '–')}, {cluster.get('date', '')}"),
        ("took", f"{figure(found.get('seconds'), 3)} s"),
    ]
    return section("Machine", table((), rows, kind="compare"), name="machine")


def not_measured(reasons: Iterable[tuple[str, str]]) -> str:
    """The rows that have no figure, and why."""
    lines = "".join(f"<li><strong>{text(name)}</strong><span>{text(why)}</span></li>" for name, why in reasons)
    return section("Not measured", f'<ol class="findings">{lines}</ol>' if lines else "", name="missing")


def keys(names: Sequence[str], *, dashed: str = "predicted") -> str:
    """The legend of a chart: a colour for each name, and what dashed lines are."""
    shown = "".join(f'<li><i class="line c{number % 6}"></i>{text(name)}</li>' for number, name in enumerate(names))
    last = f'<li><i class="dashed"></i>{text(dashed)}</li>' if dashed else ""
    return f'<ul class="keys">{shown}{last}</ul>'
