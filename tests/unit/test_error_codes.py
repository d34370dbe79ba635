"""Every error has a code with a page, every page belongs to an error, and `shoal explain` prints it."""

from __future__ import annotations

import ast
import functools
import json
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli import main
from shoal.error_pages import AREAS, read_area, read_pages
from shoal.errors import LostPeer, Problem, ShoalError
from tests.rejects import rejects

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
CODE = re.compile(r"[A-Z]\d{3}")
PAGES = {page.code: page for page in read_pages()}


class Site(NamedTuple):
    """A call that makes an error."""

    place: str
    kind: str
    codes: tuple[str, ...]
    """More than one for `"N023" if ... else "N022"`; empty: the code is no literal."""
    texts: tuple[str, ...]
    """Regular expressions of its message, as far as they can be read."""


def kinds() -> set[str]:
    """`Problem`, the errors, and the failure of a worker, which becomes one."""
    found, todo = set(), [ShoalError]
    while todo:
        kind = todo.pop()
        found.add(kind.__name__)
        todo += kind.__subclasses__()
    return found | {"Problem", "Failure", "OutOfBounds", "MismatchedModel", "LostLead"}


def sites() -> Iterator[Site]:
    names = kinds()
    for path in sorted(SOURCE.rglob("*.py")):
        is_maker = path == SOURCE / "errors.py"  # where `Problem(code, ...)` gets the code that an error was given
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            texts = dict(assigned(function))
            for call in own_calls(function):
                name, codes = called(call), codes_of(call, called(call))
                if name in names and not passes_on(call) and (codes or not is_maker):
                    yield Site(f"{path.relative_to(SOURCE)}:{call.lineno}", name, codes, texts_of(call, name, texts))


def own_calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    """Calls in a function, but not those in functions inside of it, which come by themselves."""
    todo: list[ast.AST] = [*function.body, *function.decorator_list]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Call):
            yield node
        todo += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef)]


def called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def passes_on(call: ast.Call) -> bool:
    """Whether the problems, or the failure's code, come from another error: `ShoalError(*problems)`, `code=other.code`.

    `Failure(**fields)` is one that was read from a file.
    """
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return True
    if [word.arg for word in call.keywords] == [None]:
        return True
    if called(call) != "Problem" and call.args and called_in(call.args[0]) == "Problem":
        return True
    if called(call) == "ShoalError" and ast.unparse(call) == "ShoalError(problem)":
        return True
    return any(word.arg == "code" and getattr(word.value, "attr", "") == "code" for word in call.keywords)


def called_in(node: ast.expr) -> str:
    return called(node) if isinstance(node, ast.Call) else ""


def codes_of(call: ast.Call, name: str) -> tuple[str, ...]:
    if name == "Problem":
        given = call.args[0] if call.args else None
    else:
        given = next((word.value for word in call.keywords if word.arg == "code"), None)
    values = [given.body, given.orelse] if isinstance(given, ast.IfExp) else [given]
    found = [value.value for value in values if isinstance(value, ast.Constant)]
    return tuple(map(str, found)) if len(found) == len(values) else ()


def assigned(function: ast.FunctionDef) -> Iterator[tuple[str, list[str]]]:
    """Names of a function that hold a text, such as `what`, with its expressions."""
    found: dict[str, list[str]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(expression(node.value))
    yield from found.items()


def texts_of(call: ast.Call, name: str, known: dict[str, list[str]]) -> tuple[str, ...]:
    given = call.args[1:2] if name == "Problem" else call.args[:1]
    return tuple(
        text
        for node in given
        for text in (known.get(node.id, []) if isinstance(node, ast.Name) else [expression(node)])
    )


def expression(node: ast.expr) -> str:
    """A regular expression for the values of a text: `.*` for what is formatted into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(expression(value) for value in node.values)
    return ".*"


@functools.cache
def all_sites() -> list[Site]:
    return list(sites())


def test_every_error_has_a_literal_code_with_a_page() -> None:
    assert len(all_sites()) > 500
    without = [f"{site.place}: {site.kind}" for site in all_sites() if not site.codes]
    assert without == [], "write the code as a literal: Problem('P011', ...), ShoalError(..., code='P011')"
    assert [f"{site.place}: {code}" for site in all_sites() for code in site.codes if code not in PAGES] == []


def test_every_page_belongs_to_an_error() -> None:
    used = {code for site in all_sites() for code in site.codes}
    assert sorted(PAGES.keys() - used) == []


def test_codes_and_titles_are_unique_and_in_order() -> None:
    pages = list(read_pages())
    for count in (Counter(page.code for page in pages), Counter(page.title for page in pages)):
        assert [name for name, number in count.items() if number > 1] == []
    for letter in AREAS:
        codes = [page.code for page in read_area(letter)[1]]
        assert codes == sorted(codes)
        assert all(re.fullmatch(rf"{letter}\d\d\d", code) for code in codes)


def test_a_page_has_an_example_and_sentences() -> None:
    for page in PAGES.values():
        example, *sentences = page.text.split("\n\n")
        assert example.startswith("    "), page
        assert 2 <= len(re.findall(r"[.:](?=\s|$)", " ".join(sentences))) <= 8, page
        assert all(len(line) <= 120 for text in sentences for line in text.splitlines()), page


def test_the_example_of_a_page_is_a_message_of_its_code() -> None:
    """As far as the message stands at the site. `...` stands for what an example leaves out."""
    for page in PAGES.values():
        example = page.text.split("\n\n")[0].strip()
        own = [site for site in all_sites() if page.code in site.codes]
        texts = [text for site in own for text in site.texts]
        if texts and not example.endswith("...") and all(site.kind != "Failure" for site in own):
            assert any(re.search(rf"(^|: ){text}$", example, re.DOTALL) for text in texts), (page, texts)


# ── how a code shows, and how it travels ─────────────────────────────────────────────────────────────────────────────


def test_the_code_ends_the_first_line() -> None:
    assert str(Problem("N022", "rank 1 failed\nTraceback", "look")) == "rank 1 failed [N022]\nTraceback\n    fix: look"
    both = ShoalError(Problem("P001", "a"), Problem("P005", "b", "c"), Problem("P001", "d"), title="x")
    assert str(both) == "3 problems in x\n  a [P001]\n  b [P005]\n      fix: c\n  d [P001]"
    assert both.codes == ("P001", "P005")


def test_codes_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(LostPeer("a", fix="b", code="N012")))
    assert (type(error), error.problems) == (LostPeer, (Problem("N012", "a", "b"),))


def test_the_terminal_shows_codes_and_one_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "tpp=2 tp=0", "--json"]) == 2
    out, err = capsys.readouterr()
    assert [problem["code"] for problem in json.loads(out)["error"]["problems"]] == ["P002", "P005"]
    assert err.count("[P002]") == err.count("[P005]") == 1
    assert err.endswith("\nshoal explain P002 P005 says more\n")


def test_rejects_looks_at_code_and_values() -> None:
    def fail() -> None:
        raise ShoalError("batch 7 over 2 ranks", code="P011")

    with rejects("P011", 7, "2 ranks"):
        fail()
    for wrong in (("P012", 7), ("P011", 8)):
        with pytest.raises(AssertionError, match="expected"), rejects(*wrong):
            fail()


# ── shoal explain ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_explain_prints_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "p011"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"P011: {PAGES['P011'].title}\n\n    batch 10 is not divisible by ")
    assert out.rstrip().endswith(PAGES["P011"].text[-40:])
    assert main(["explain", "[P011]", "C001", "--json"]) == 0
    assert [page["code"] for page in json.loads(capsys.readouterr().out)["pages"]] == ["P011", "C001"]


def test_explain_prints_a_lint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "SH01", "P011", "--json"]) == 0
    lint, error = json.loads(capsys.readouterr().out)["pages"]
    assert (lint["code"], lint["title"], error["code"]) == ("SH01", "tp between nodes", "P011")
    assert "nothing hides it" in lint["text"]
    assert "Evidence: 3.6B on 64 A100" in lint["text"]
    assert main(["explain", "sh1"]) == 2
    assert "shoal explain SH01" in capsys.readouterr().err


def test_explain_lists_all_codes_by_area(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(PAGES)
    assert [line[0] for line in lines if line and not line.startswith("  ")] == list(AREAS)
    assert main(["explain", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["pages"]) == len(PAGES)


@pytest.mark.parametrize(("code", "fix"), [("P11", "P011"), ("M01", "M001"), ("Z999", "lists all"), ("n0122", "N012")])
def test_an_unknown_code(code: str, fix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", code]) == 2
    err = capsys.readouterr().err
    assert f"there is no error code '{code.upper()}' [R052]" in err
    assert fix in err


def test_explain_imports_neither_torch_nor_pydantic() -> None:
    check = "import sys; from shoal.cli import main; main(['explain', 'P011']); "
    check += "assert {'torch', 'pydantic', 'rich', 'yaml'}.isdisjoint(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, stdout=subprocess.DEVNULL, timeout=60)
