"""Parse untrusted YAML and JSON within bounds of size, depth, alias expansion and numbers.

For any text, the result is plain data of a bounded size, or one `ShoalError`. PyYAML alone has no such bounds. A few
lines of aliases expand to billions of nodes as soon as the data is printed or copied. Deep nesting exhausts Python's
stack, and a long number raises an error that is not a YAML error.
"""

from __future__ import annotations

import json
import os
import re
import select
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from shoal.errors import ShoalError
from shoal.files import opened

MOST_BYTES = 2**18
"""Size of a recipe, a cluster or a config; a long one has a hundredth of that."""
MOST_NODES = 20_000
"""Keys and values, aliases expanded."""
DEEPEST = 32
"""Levels of nesting."""
LARGEST = 2**64
"""Bound of the absolute value of whole numbers."""
PIPE_SECONDS = 5.0
"""Seconds to wait for the first and each further part of a pipe."""


def read_text(path: Path, fix: str) -> str:
    """The text of a regular file of a bounded size, or of a pipe of the shell: `shoal train <(sed ... recipe.yaml)`.

    Raises `OSError` as `open` does.
    """
    data = _from_pipe(path) if _is_shell_pipe(path) else None
    if data is None:
        with opened(path) as file:
            data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise OutOfBounds(f"{str(path)!r} must have at most {MOST_BYTES:,} bytes", fix=fix, code="R019")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ShoalError(f"{str(path)!r} must be text in UTF-8: {error}", fix=fix, code="R020") from None


class OutOfBounds(ShoalError):
    """A text that may be valid, but is too large, too deep, or has too long numbers."""


class _Bound(ValueError):
    pass


def parse_yaml(text: str, where: str, fix: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """Parse a YAML text. `where` names it in errors."""

    def parse() -> Any:
        if _brackets(text) > 20 * DEEPEST:  # PyYAML needs time quadratic in their number
            raise _Bound(f"more than {DEEPEST} levels of nesting")
        reader = loader(text)
        try:
            node = reader.get_single_node()
            if node is None:
                return None
            _reject_many(node)
            return reader.construct_document(node)
        finally:
            reader.dispose()

    return _parsed(parse, "YAML", where, fix)


def parse_json(text: str, where: str, fix: str) -> Any:
    """Parse a JSON text."""
    return _parsed(lambda: json.loads(text), "JSON", where, fix)


def _parsed(parse: Callable[[], Any], kind: str, where: str, fix: str) -> Any:
    try:
        value = parse()
        _reject_large(value)
    except RecursionError:
        raise OutOfBounds(f"{where} has more than {DEEPEST} levels of nesting", fix=fix, code="R019") from None
    except _Bound as error:
        raise OutOfBounds(f"{where} has {error}", fix=fix, code="R019") from None
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, AttributeError) as error:
        if "integer string conversion" in str(error):  # Python's own bound
            raise OutOfBounds(f"{where} has a whole number of more than 4,300 digits", fix=fix, code="R019") from None
        raise ShoalError(f"{where} is not valid {kind}: {str(error)[:1000]}", fix=fix, code="R021") from None
    return value


def short(value: Any, most: int = 200) -> str:
    """The `repr` of a value, shortened for an error."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


# ---- bounds ---------------------------------------------------------------------------------------------------------


def _reject_many(root: yaml.Node) -> None:
    """Raise if a document has too many nodes, with aliases expanded, or too many levels. Each node is visited once."""
    known: dict[int, int] = {}
    unfinished: set[int] = set()

    def count(node: yaml.Node, depth: int) -> int:
        if depth > DEEPEST:
            raise _Bound(f"more than {DEEPEST} levels of nesting")
        if id(node) in unfinished:
            raise _Bound("an alias (*name) inside its own anchor")
        if id(node) not in known:
            unfinished.add(id(node))
            known[id(node)] = 1 + sum(count(part, depth + 1) for part in _parts(node))
            unfinished.discard(id(node))
        if known[id(node)] > MOST_NODES:
            raise _Bound(f"more than {MOST_NODES:,} values, with aliases (*name) expanded")
        return known[id(node)]

    count(root, 0)


def _brackets(text: str) -> int:
    """The nesting depth of brackets. Those in comments and quoted texts count too; the bound allows for them."""
    depth = deepest = 0
    for match in re.finditer(r"[\[{]+|[\]}]+", text):
        depth += len(match[0]) if match[0][0] in "[{" else -len(match[0])
        deepest = max(deepest, depth)
    return deepest


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _reject_large(value: Any, depth: int = 0) -> None:
    """Raise if data is too deep, or has a number that is too large or a text with a NUL character."""
    if depth > DEEPEST:
        raise _Bound(f"more than {DEEPEST} levels of nesting")
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        for one in value:
            _reject_large(one, depth + 1)
    elif isinstance(value, int) and abs(value) >= LARGEST:
        raise _Bound(f"a whole number of about {round(value.bit_length() * 0.30103):,} digits; at most 19 are allowed")
    elif isinstance(value, str) and "\0" in value:
        raise _Bound(f"a NUL character in the text {short(value)}")


# ---- pipes ----------------------------------------------------------------------------------------------------------


def _is_shell_pipe(path: Path) -> bool:
    try:
        return str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/")) and stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


def _from_pipe(path: Path) -> bytes:
    """The bytes of a pipe until its end; `OSError` if nothing arrives for too long."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    data = b""
    try:
        while len(data) <= MOST_BYTES:
            if not select.select([handle], [], [], PIPE_SECONDS)[0]:
                raise TimeoutError(110, f"nothing was written to it for {PIPE_SECONDS:.0f} s", str(path))
            part = os.read(handle, 65536)
            if not part:
                break
            data += part
    finally:
        os.close(handle)
    return data
