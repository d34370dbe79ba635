"""`shoal explain [CODE ...]`: print the page of an error code, or the list of all codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from shoal.cli.reports.console import show
from shoal.error_pages import AREAS, ErrorPage, read_area, read_pages
from shoal.errors import Problem, nearest, raise_if

LINTS = "SH"
"""How the code of a lint begins."""
USAGE = """\
usage: shoal explain [CODE ...] [--json]

Print the page of each code: the rule, why it holds, an example of the message, and the ways to fix it.
Without a code, list all codes. The code stands in brackets in the message of an error, as in [P011]; that of a lint,
as SH01, stands at the beginning of its line.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the pages; returns 0."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    as_json = "--json" in arguments
    codes = [word.strip("[],").upper() for word in arguments if word != "--json"]
    pages = {page.code: page for page in read_pages()}
    pages |= _lints() if any(code.startswith(LINTS) for code in codes) else {}
    raise_if(_unknown(code, pages) for code in codes if code not in pages)
    found = [pages[code] for code in dict.fromkeys(codes)] or list(pages.values())
    if as_json:
        print(json.dumps({"pages": [asdict(page) for page in found]}))
    elif not codes:
        print(_listing())
    elif sys.stdout.isatty():
        _show(found)
    else:
        print("\n\n".join(f"{page.code}: {page.title}\n\n{page.text}" for page in found))
    return 0


def _lints() -> dict[str, ErrorPage]:
    """The rules of the planner, which few readers of a page need."""
    from shoal.planner.lint.lint import RULES

    more = (
        "`shoal plan` and `shoal train` report it with its predicted cost and a fix; docs/concepts/lints.md has more."
    )
    texts = {rule: f"{rule.check.__doc__}\n\nEvidence: {rule.evidence}.\n\n{more}" for rule in RULES}
    return {rule.code: ErrorPage(rule.code, rule.title, text) for rule, text in texts.items()}


def _unknown(code: str, known: dict[str, ErrorPage]) -> Problem:
    if code.startswith("--"):
        near = nearest(code.lower(), ["--json", "--help"])
        return Problem("R002", f"unknown option {code.lower()}", near or "shoal explain --help")
    is_lint = code.startswith(LINTS)
    filled = LINTS + code[2:].zfill(2) if is_lint else code[:1] + code[1:].zfill(3)  # P11 is P011
    near = filled if filled in known else nearest(code, [each for each in known if each[:1] == code[:1]] or known)
    fix = f"shoal explain {near}" if near else "shoal explain, which lists all codes"
    return Problem("R052", f"there is no error code {code!r}", fix)


def _listing() -> str:
    """All codes with their titles, by area."""
    areas = [(letter, *read_area(letter)) for letter in AREAS]
    return "\n\n".join(
        "\n".join([f"{letter}: {title}", *(f"  {page.code}  {page.title}" for page in pages)])
        for letter, title, pages in areas
    )


def _show(pages: Sequence[ErrorPage]) -> None:
    from rich.markdown import Markdown

    text = "\n\n".join(f"## {page.code}: {page.title}\n\n{page.text}" for page in pages)
    show(lambda console: console.print(Markdown(text)), sys.stdout)
