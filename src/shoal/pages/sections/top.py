"""The top of a page: the verdict, its figures, and what to look at next."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shoal.pages.html import section, text
from shoal.pages.run.findings import findings
from shoal.pages.run.read_run import RunRecord
from shoal.pages.run.verdict import facts, verdict_of
from shoal.version import __version__

MOST_FINDINGS = 6


def header(runs: Sequence[RunRecord], verb: str = "report") -> str:
    """The name of the page, and when it was made."""
    names = " · ".join(f"<bdi>{text(run.name, 80)}</bdi>" for run in runs)
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    made = f'<p class="made">made {made}, shoal {__version__}</p>'
    return f'<header><p class="brand">shoal {verb}</p><h1>{names}</h1>{made}</header>'


def verdict(run: RunRecord) -> str:
    """The verdict of one run with its figures."""
    found = verdict_of(run)
    reason = f'<p class="reason">{text(found.reason, 1500)}</p>' if found.reason else ""
    cards = "".join(
        f'<div class="fact"><dt>{text(name)}</dt><dd>{_with_unit(value)}</dd>'
        f'<dd class="remark">{text(remark)}</dd></div>'
        for name, value, remark in facts(run)
    )
    return (
        f'<section class="verdict {run.state}"><p class="headline"><span class="dot"></span>{text(found.headline)}</p>'
        f'{reason}<dl class="facts">{cards}</dl></section>'
    )


def _with_unit(value: str) -> str:
    """A figure whose unit is small."""
    amount, _, unit = value.partition(" ")
    return f"{text(amount)} <small>{text(unit)}</small>" if unit and " " not in unit else text(value)


def look_next(run: RunRecord) -> str:
    """The findings, or that there are none."""
    found = findings(run)[:MOST_FINDINGS]
    rows = "".join(
        f"<li><strong>{text(each.what)}</strong><span>{text(each.evidence)}</span><em>{text(each.next)}</em></li>"
        for each in found
    )
    body = f'<ol class="findings">{rows}</ol>' if rows else '<p class="note">Nothing in the metrics stands out.</p>'
    return section("Look at next", body, name="next", note=run.metrics.sampled)
