"""The checks of `tools/`: each finds a defect that is put before it, and the tree itself passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tools import check_sizes, check_words

ROOT = Path(__file__).parents[2]


def sizes_of(folder: Path, known: dict[str, dict[str, int]] | None = None, **files: str) -> list[str]:
    """Write modules of a package `p`, `a__b` being p/a/b.py, and return what the check finds."""
    for name, text in {"__init__": "", **files}.items():
        path = folder / "p" / f"{name.replace('__', '/') if name != '__init__' else name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    modules = [check_sizes.read(path, folder) for path in sorted((folder / "p").rglob("*.py"))]
    return check_sizes.problems(modules, known or {})


def function(lines: int, parameters: int = 0, *, name: str = "f") -> str:
    given = ", ".join(f"x{number}" for number in range(parameters))
    return f"def {name}({given}):\n" + "    pass\n" * (lines - 1)


def klass(lines: int) -> str:
    return "class C:\n" + "    x = 1\n" * (lines - 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n" * 451, "lines of a file: p.m has 451, and at most 450 are allowed"),
        (function(61), "lines of a function: p.m.f has 61, and at most 60 are allowed"),
        (klass(301), "lines of a class: p.m.C has 301, and at most 300 are allowed"),
        (function(2, 9), "parameters: p.m.f has 9, and at most 8 are allowed"),
        (
            "class C:\n    def g(self, a, b, c, d, e, f, g, h, *i): pass",
            "parameters: p.m.C.g has 9, and at most 8 are allowed",
        ),
    ],
)
def test_one_that_is_too_large(text: str, expected: str, tmp_path: Path) -> None:
    short = {f"short_{number}": function(2) * 20 for number in range(9)}  # so that medians and percentiles are low
    assert sizes_of(tmp_path, m=text, **short) == [expected]


def test_those_that_are_just_small_enough(tmp_path: Path) -> None:
    text = function(60, 8) + "class C:\n    def f(self, a, b, c, d, e, f, g, h): pass\n" + function(2, name="g") * 20
    assert sizes_of(tmp_path, m=text) == []


def test_the_median_of_files_and_the_percentile_of_functions(tmp_path: Path) -> None:
    long = "".join(function(21, name=f"f{number}") for number in range(7))
    assert sizes_of(tmp_path, a=long, b=long) == [
        "lines of a file: the median is 147, and at most 130 are allowed",
        "lines of a function: the 90th percentile is 21, and at most 20 are allowed",
    ]


def test_a_folder_of_too_many_modules(tmp_path: Path) -> None:
    files = {f"a__m{number}": "" for number in range(12)}
    assert sizes_of(tmp_path, a____init__="", **files) == []
    assert sizes_of(tmp_path, a__m12="") == ["modules: p.a has 13, and at most 12 are allowed"]


def test_import_cycles_also_by_imports_in_functions(tmp_path: Path) -> None:
    a = "from p import b\n"
    assert sizes_of(tmp_path, a=a, b="import os\n", c="import p.a\n") == []
    for b in (
        "import p.c\n",
        "def f():\n    from p.c import x\n",
        "class C:\n    try:\n        import p.c\n    except E: ...\n",
    ):
        expected = "files in an import cycle: p.a p.b p.c has 3, and at most 0 are allowed"
        assert sizes_of(tmp_path, b=b) == [expected]
    hidden = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.c\n"
    assert sizes_of(tmp_path, b=hidden) == []
    assert len(sizes_of(tmp_path, b=hidden + "else:\n    import p.a\n")) == 1


def test_what_is_known_may_shrink_and_not_grow(tmp_path: Path) -> None:
    known = {"lines of a file": {"p.m": 500}}
    small = {f"small_{number}": "" for number in range(3)}
    assert sizes_of(tmp_path, known, m="x = 1\n" * 500, **small) == []
    assert sizes_of(tmp_path, known, m="x = 1\n" * 460) == []
    assert sizes_of(tmp_path, known, m="x = 1\n" * 501) == [
        "lines of a file: p.m has 501, and at most 450 are allowed (KNOWN allows 500)"
    ]
    expected = ["lines of a file: p.m is within the limit of 450: remove it from KNOWN"]
    assert sizes_of(tmp_path, known, m="x = 1\n" * 450) == expected
    (tmp_path / "p/m.py").unlink()
    assert sizes_of(tmp_path, known) == expected


# ── words ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('x = "the rank is told"', [(1, "told")]),
        ('"""Nobody\n\n    goes\n    on."""', [(1, "nobody"), (3, "goes on")]),
        (
            'raise E(\n    f"rank {told.rank} refuses"\n    f" to go on with {nobody}"\n)',
            [(2, "refuses"), (3, "go on")],
        ),
        ('x = "a run goes "\\\n    "on"', [(1, "goes on")]),
        ("told = nobody  # refused, and told so", []),
        ('x = "untold, islander, refuse_unbuilt, resumed"', []),
    ],
)
def test_words_are_found_in_strings_and_not_in_code(source: str, expected: list[tuple[int, str]]) -> None:
    assert list(check_words.hits_in_code(source)) == expected


def test_every_word_has_a_plain_one() -> None:
    text = "Told tells whoever owes; Islands, remedies and misfits of one's own speaks for nothing would come of"
    words = [word for _, word in check_words.hits_in_text(text)]
    assert len(words) == 10
    assert str(check_words.Hit("a.md", 7, words[0])) == "a.md:7: 'told': write reported, given or set"
    assert all(": write " in str(check_words.Hit("a.md", 1, word)) for word in words)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("src/shoal", "docs", "tools"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/shoal/a.py").write_text('"""Nobody is told."""\n')
    (tmp_path / "docs/b.md").write_text("It goes\non, and is refused; refused.\n")
    return tmp_path


def test_a_word_more_fails_and_a_word_less_is_written_down(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_words.main([], tree) == 1, "without the file nothing is excused"
    assert check_words.main(["--update"], tree) == 0
    left = (tree / check_words.LEFT).read_text()
    assert left == "docs/b.md: goes on 1, refused 2\nsrc/shoal/a.py: nobody 1, told 1\n"
    assert check_words.main([], tree) == 0
    capsys.readouterr()

    (tree / "docs/b.md").write_text("It goes\non, and is refused; refused.\nRefused!\n")
    assert check_words.main([], tree) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "docs/b.md:3: 'refused': write reject"
    assert check_words.main(["--update"], tree) == 1
    assert "1 more of 'refused'" in capsys.readouterr().err

    (tree / "docs/b.md").write_text("It is refused.\n")
    assert check_words.main([], tree) == 1
    assert "--update" in capsys.readouterr().err
    (tree / "docs/b.md").rename(tree / "docs/c.md")
    assert check_words.main(["--update"], tree) == 0, "a file may be moved"
    assert (tree / check_words.LEFT).read_text() == "docs/c.md: refused 1\nsrc/shoal/a.py: nobody 1, told 1\n"


@pytest.mark.wide  # `make check` runs them
@pytest.mark.parametrize("words", ["check_sizes.py --check", "check_words.py"])
def test_the_tree_passes(words: str) -> None:
    name, *options = words.split()
    done = subprocess.run([sys.executable, f"tools/{name}", *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
