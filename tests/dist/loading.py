"""Finding a test's function inside a worker, with asserts that show their values as pytest's do."""

from __future__ import annotations

import ast
import importlib
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def load_function(module_name: str, path: str, qualified_name: str) -> Callable[..., Any]:
    """The function of this name; its module is loaded from its file, whether or not it can be imported by name."""
    if "<" in qualified_name:
        raise TypeError(f"{qualified_name} is local to another function; a worker can only find one at module level")
    if Path(path).name.startswith("test_"):
        module = sys.modules.get(module_name) or load_rewritten(module_name, path)
    else:
        module = importlib.import_module(module_name)
    return operator.attrgetter(qualified_name)(module)  # type: ignore[no-any-return]


def load_rewritten(name: str, path: str) -> ModuleType:
    """A test module as pytest would load it. Its rewriting has no public door for a process without a session."""
    from _pytest.assertion.rewrite import rewrite_asserts

    source = Path(path).read_bytes()
    tree = ast.parse(source, filename=path)
    rewrite_asserts(tree, source, path)
    module = ModuleType(name)
    module.__file__ = path
    module.__package__ = name.rpartition(".")[0]
    sys.modules[name] = module  # first, so that pickle and dataclasses find it
    exec(compile(tree, path, "exec", dont_inherit=True), module.__dict__)
    return module
