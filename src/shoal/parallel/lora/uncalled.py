"""Find layers whose weight a module reads by itself: LoRA changes what a layer returns when it is called.

`self.v_proj.weight` in the source of the module shows it, as in WavLM's attention and in the mixer of Mamba. Functions
that initialise or tie weights do not count, and neither does what a weight is: its dtype, its shape.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn

OF_TORCH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""Modules of torch that may read the weights of their layers without calling them."""
_FACTS = {"dtype", "device", "shape", "size", "dim", "ndim", "numel", "element_size", "is_meta", "requires_grad"}
_ASKING = {"isinstance", "hasattr", "getattr", "id"}
_BEFORE = ("init", "reset", "tie", "resize", "set_", "get_output", "get_input", "repr")
"""In the name of a function that is no part of a forward."""


def uncalled(parent: nn.Module, layer: str) -> bool:
    """Whether a module may use the weight of a child without calling it, and never calls it."""
    if isinstance(parent, OF_TORCH):
        return True
    kind: Any = type(parent)
    read, called = _uses(kind)
    return layer in read - called


def also_read(parent: nn.Module, layer: str) -> bool:
    """Whether it does on some path, and calls the child on another."""
    kind: Any = type(parent)
    read, called = _uses(kind)
    return layer in read & called


@cache
def _uses(kind: Any) -> tuple[set[str], set[str]]:
    """The children whose weights the functions of a class read, and those that they call."""
    read: set[str] = set()
    called: set[str] = set()
    for function in _functions(kind):
        facts = {id(node) for one in ast.walk(function) for node in _asked(one)}
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in ("weight", "bias") and id(node) not in facts:
                read |= _child(node.value)
            elif isinstance(node, ast.Call):
                called |= _child(node.func)
    return read, called


def _functions(kind: type) -> Iterator[ast.FunctionDef]:
    """The functions of a class and its bases that a forward may run; those of torch call what they use."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("builtins", "torch"):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # a class without a file, such as one of a prompt
            continue
        for node in getattr(tree, "body", ()):
            if isinstance(node, ast.FunctionDef) and node.name not in seen:
                seen.add(node.name)
                if not any(word in node.name for word in _BEFORE):
                    yield node


def _asked(node: ast.AST) -> Iterator[Any]:
    """Parts of an expression that ask what a weight is, and do not compute with it."""
    if isinstance(node, ast.Attribute) and node.attr in _FACTS:
        yield node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ASKING:
        yield from node.args
    elif isinstance(node, ast.Compare) and all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops):
        yield from (node.left, *node.comparators)


def _child(node: ast.AST) -> set[str]:
    """The name of the child in `self.NAME`; nothing for another expression."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return {node.attr} if is_own else set()  # type: ignore[attr-defined]
