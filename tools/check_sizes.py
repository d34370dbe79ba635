"""The numbers worth watching, reported and not enforced: `make sizes`, or `python tools/check_sizes.py FOLDER`.

Readable code of this kind has a median file of 120 to 160 lines and none above 420, nine functions of ten within 35
lines, and no import cycle. Beauty is lost by growth, which nobody sees from inside a change; hence this page.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
TODO = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!.*#\d)")


@dataclass(frozen=True)
class Module:
    name: str
    lines: list[str]
    tree: ast.Module


def main(folder: Path) -> None:
    modules = [read(path, folder.parent) for path in sorted(folder.rglob("*.py"))]
    nodes = [(module, node) for module in modules for node in ast.walk(module.tree)]
    functions = [(module, node) for module, node in nodes if isinstance(node, Function)]
    sizes = [len(module.lines) for module in modules]
    lengths = sorted(length(function) for _, function in functions)
    print(f"lines                    {sum(sizes)} in {len(sizes)} files")
    print(f"lines per file           median {statistics.median(sizes):.0f}, max {max(sizes)}")
    print(f"lines per function       median {statistics.median(lengths):.0f}, p90 {lengths[len(lengths) * 9 // 10]}")
    print(f"annotated functions      {statistics.mean(is_annotated(function) for _, function in functions):.0%}")
    kinds = [type(node) for _, node in nodes]
    print(f"raise : assert           {kinds.count(ast.Raise)} : {kinds.count(ast.Assert)}")

    def show_nodes(title: str, test: Callable[[ast.AST], bool]) -> None:
        show(title, [f"{m.name}:{n.lineno}  {m.lines[n.lineno - 1].strip()}" for m, n in nodes if test(n)])

    def show_over(limit: int, title: str, measure: Callable[[Function], int]) -> None:
        show(title, [f"{m.name}:{f.lineno}  {f.name} {measure(f)}" for m, f in functions if measure(f) > limit])

    show("files over 300 lines", [f"{m.name} {len(m.lines)}" for m in modules if len(m.lines) > 300])
    show_over(60, "functions over 60 lines", length)
    show_over(3, "nesting over 3", nesting)
    show_over(6, "parameters over 6", lambda function: len(parameters(function)))
    show("import cycles", cycles(modules))
    show_nodes("imports in functions", lambda node: isinstance(node, Function) and any(map(is_import, ast.walk(node))))
    show_nodes("os.environ", lambda node: isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    show_nodes("print", lambda node: isinstance(node, ast.Name) and node.id == "print")
    numbered = [(f"{module.name}:{number}", line) for module in modules for number, line in enumerate(module.lines, 1)]
    show("TODO without an issue", [f"{where}  {line.strip()}" for where, line in numbered if TODO.search(line)])


def read(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return Module(name, text.splitlines(), ast.parse(text, str(path)))


def show(title: str, found: list[str]) -> None:
    print("\n    ".join([f"{title:<24} {len(found)}", *found]))


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def nesting(node: ast.AST) -> int:
    """The deepest block within block; an `elif` is no deeper than its `if`."""
    depths = [0]
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        depths.append(nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return max(depths)


def parameters(function: Function) -> list[ast.arg]:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [parameter for parameter in named if parameter.arg not in ("self", "cls")]


def is_annotated(function: Function) -> bool:
    return function.returns is not None and all(parameter.annotation for parameter in parameters(function))


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def cycles(modules: list[Module]) -> list[str]:
    """Groups of modules that import each other when they are loaded, directly or by way of others."""
    reach = {module.name: imported(module) for module in modules}
    for middle in reach:  # Warshall's closure
        for start in reach:
            reach[start] |= reach[middle] if middle in reach[start] else set()
    return sorted({" ".join(b for b in reach if b in reach[a] and a in reach[b]) for a in reach if a in reach[a]})


def imported(module: Module) -> set[str]:
    """The names that a module's top level imports; `from a import b` may mean the module a or a.b."""
    imports = [node for node in module.tree.body if is_import(node)]
    bases = {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    return bases | {
        f"{getattr(node, 'module', '')}.{alias.name}".lstrip(".") for node in imports for alias in node.names
    }


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/shoal"))
