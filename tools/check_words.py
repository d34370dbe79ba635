"""Check that what a user reads is in plain words: strings and docstrings of the package, docs, recipes and examples.

    python tools/check_words.py            name each word that WORDS has and words_left.txt does not; exit 1 if any
    python tools/check_words.py --all      name also those of words_left.txt
    python tools/check_words.py --update   write words_left.txt

tools/words_left.txt counts the words that are still there, by file. It may only shrink: `--update` moves counts between
files, and rejects more of a word than before. Where there is no such file, it writes the first.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WORDS = {
    # regular expression → what to write instead
    "told": "reported, given or set",
    "tells?": "reports, says or shows",
    "nobody": "no rank, no process or no user, or the passive",
    "whoever": "the rank, process or user that",
    "go(?:es|ing)? on|went on": "resume or continue",
    "of one's own": "its own, or your own",
    "of (?:its|their) own accord": "automatically",
    "believe[sd]?": "assumes",
    "owe[sd]?": "residual, or needs",
    "refuse[sd]?|refusing|refusals?": "reject",
    "held against": "compared with",
    "anew": "again, or start over",
    "speaks?(?: for)?": "represents, or sends",
    "for want of": "without",
    "misfits?": "problem, or conflict",
    "islands?": "replica",
    "ask(?:s|ed)": "requested, set or given",
    "meets?|meetings?": "synchronize, or satisfy",
    "wants?|wanted": "expect, or require",
    "habits?": "framework profile",
    "anatomy": "model shapes",
    "synchrony": "sync",
    "remed(?:y|ies)": "suggestion",
    "crew": "worker group",
    "in 8 of 10 runs": "80 % interval",
    "one thing else": "change",
    "nothing would come of": "has no effect",
}
PLAIN = [(re.compile(words, re.IGNORECASE), plain) for words, plain in WORDS.items()]
ANY = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)

ROOT = Path(__file__).parents[1]
LEFT = "tools/words_left.txt"
CODE = ("src/shoal/**/*.py",)
TEXT = (
    "docs/**/*.md",
    "src/shoal/**/*.md",
    "README.md",
    "CHANGELOG.md",
    "recipes/*.yaml",
    "examples/**/*.py",
    "examples/**/*.md",
)

Counts = Counter[tuple[str, str]]
"""(file, word) → how often."""


@dataclass(frozen=True)
class Hit:
    file: str
    line: int
    word: str

    def __str__(self) -> str:
        plain = next(plain for pattern, plain in PLAIN if pattern.fullmatch(self.word))
        return f"{self.file}:{self.line}: {self.word!r}: write {plain}"


def main(options: list[str], root: Path = ROOT) -> int:
    hits = list(find_all(root))
    counts = Counter((hit.file, hit.word) for hit in hits)
    left = read_left(root)
    if "--update" in options:
        return update(root, counts, left)
    allowed = Counter() if left is None or "--all" in options else left
    new = [hit for hit in hits if counts[hit.file, hit.word] > allowed[hit.file, hit.word]]
    gone = allowed - counts
    said = [str(hit) for hit in new]
    said += [f"{file}: {word!r} is {many} times fewer than {LEFT} says" for (file, word), many in sorted(gone.items())]
    said += ["mend with: python tools/check_words.py --update"] if gone else []
    print("\n".join(said), file=sys.stderr, end="\n" if said else "")
    return 1 if said else 0


# ── where words are ──────────────────────────────────────────────────────────────────────────────────────────────────


def find_all(root: Path) -> Iterator[Hit]:
    for kinds, find in ((CODE, hits_in_code), (TEXT, hits_in_text)):
        for path in sorted({path for kind in kinds for path in root.glob(kind)}):
            for line, word in find(path.read_text(encoding="utf-8")):
                yield Hit(path.relative_to(root).as_posix(), line, word)


def hits_in_text(text: str) -> Iterator[tuple[int, str]]:
    for match in ANY.finditer(text):
        yield 1 + text.count("\n", 0, match.start()), " ".join(match[0].lower().split())


def hits_in_code(source: str) -> Iterator[tuple[int, str]]:
    """Look at the strings and not at the code or its comments. A string's value is what counts: it may be made of
    several literals, and what an f-string inserts is code."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for _, word in hits_in_text(node.value):
                yield _line_of(word, lines, node), word


def _line_of(word: str, lines: list[str], node: ast.Constant) -> int:
    """The first line of a literal that has the word's beginning."""
    first = re.compile(rf"\b{re.escape(word.split()[0])}\b", re.IGNORECASE)
    numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return next((number for number in numbers if first.search(lines[number - 1])), node.lineno)


# ── what is left ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_left(root: Path) -> Counts | None:
    """Lines such as `docs/run.md: told 3, goes on 1`; None where there is no such file."""
    path = root / LEFT
    if not path.exists():
        return None
    counts: Counts = Counter()
    for line in path.read_text(encoding="utf-8").splitlines():
        file, _, entries = line.partition(": ")
        for entry in entries.split(", "):
            word, _, many = entry.rpartition(" ")
            counts[file, word] = int(many)
    return counts


def update(root: Path, counts: Counts, left: Counts | None) -> int:
    if left is not None and (more := _by_word(counts) - _by_word(left)):
        said = ", ".join(f"{many} more of {word!r}" for word, many in sorted(more.items()))
        print(f"{LEFT} may only shrink, and there are {said}: python tools/check_words.py names them", file=sys.stderr)
        return 1
    files = sorted({file for file, _ in counts})
    lines = [
        f"{file}: {', '.join(f'{word} {counts[file, word]}' for word in _words_of(file, counts))}" for file in files
    ]
    (root / LEFT).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


def _by_word(counts: Counts) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, word), many in counts.items():
        found[word] += many
    return found


def _words_of(file: str, counts: Counts) -> list[str]:
    return sorted(word for name, word in counts if name == file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
