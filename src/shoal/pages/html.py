"""The frame of a page: escaped text, inert data, the policy that forbids every request, styles and scripts inline."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"
LONGEST = 400
"""Characters of a text on a page; the rest of a longer one is left out."""

# Control characters, and those that change the direction of the text after them.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")

_FIGURE = re.compile(r"[+-]?[\d.,]+ (?:%|[kKMGT]?i?B|[µm]?s|min|h|d|k|M|T)(?:/s)?")


def text(value: Any, most: int = LONGEST) -> str:
    """Any value as inert text of HTML.

    >>> text("<script>")
    '&lt;script&gt;'
    """
    words = _UNSEEN.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return html.escape(words if len(words) <= most else f"{words[:most]}…", quote=True)


def data(value: Any) -> str:
    """A value as JSON that cannot end the script element around it. A number that is not finite is null."""
    words = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value


def section(title: str, body: str, *, name: str = "", note: str = "") -> str:
    """A part of a page with a heading. `title`, `name` and `note` are our own words; `body` is HTML."""
    if not body:
        return ""
    remark = f'<p class="note">{note}</p>' if note else ""
    return f"<section{f' id={name}' if name else ''}><h2>{title}</h2>{remark}{body}</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], *, kind: str = "") -> str:
    """A table of texts, each of which is escaped. It scrolls by itself where the page is narrow."""
    heads = "".join(f"<th>{text(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{_figure(cell)}</td>' for cell in row)}</tr>" for row in rows)
    top = f"<thead><tr>{heads}</tr></thead>" if head else ""
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{lines}</tbody></table></div>' if lines else ""


def _figure(cell: Any) -> str:
    """A cell as text; a figure and its unit stay in one line.

    >>> _figure("0.306 ms"), _figure("3 plans")
    ('0.306&nbsp;ms', '3 plans')
    """
    words = text(cell)
    return words.replace(" ", "&nbsp;") if _FIGURE.fullmatch(words) else words


def details(title: str, body: str) -> str:
    """A part that is closed at first. `body` is HTML."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"


CHARTS = ("uPlot.iife.min.js", "page.js")
"""Scripts that draw curves."""


def policy(scripts: Sequence[str], *, is_live: bool = False) -> str:
    """The content security policy of a page with these scripts. A live page may ask its own server."""
    hashes = " ".join(f"'sha256-{_digest(_asset(name))}'" for name in scripts) or "'none'"
    own = " connect-src 'self';" if is_live else ""
    return (
        f"default-src 'none'; script-src {hashes};{own} style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
        " form-action 'none'"
    )


def page(title: str, body: str, payload: Any = None, *, scripts: Sequence[str] = CHARTS, is_live: bool = False) -> str:
    """The whole page, in one file. `scripts`: files of `assets`. A page without a payload has none."""
    scripts = () if payload is None else scripts
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy(scripts, is_live=is_live)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<title>{text(title)}</title><link rel="icon" href="data:,">',
            f"<style>{_asset('uPlot.min.css')}\n{_asset('page.css')}</style></head>",
            f"<body><main>{body}</main>",
            *([f'<script type="application/json" id="data">{data(payload)}</script>'] if scripts else []),
            *(f"<script>{_asset(name)}</script>" for name in scripts),
            "</body></html>",
            "",
        ]
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
