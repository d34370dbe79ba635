"""Check that files, classes and functions stay small, and that no files import each other in a circle.

    python tools/check_sizes.py [FOLDER]   print every number, then what breaks a limit; exit 1 if anything does
    python tools/check_sizes.py --check    print only what breaks a limit

KNOWN lists what breaks a limit today, with its value. An entry may shrink and never grow, and has to be removed once
its value is within the limit. Nothing is added to it.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FILE_MEDIAN, FUNCTION_P90 = 130, 20
LIMITS = {"lines of a file": 450, "lines of a function": 60, "lines of a class": 300, "parameters": 8, "modules": 12}
LIMITS["files in an import cycle"] = 0

KNOWN: dict[str, dict[str, int]] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
TODO = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!.*#\d)")


@dataclass(frozen=True)
class Module:
    name: str
    is_package: bool
    lines: list[str]
    tree: ast.Module

    @cached_property
    def definitions(self) -> list[tuple[str, Function | ast.ClassDef]]:
        """The functions and classes, at any depth, with their qualified names."""
        return list(_definitions(self.tree, self.name))

    @cached_property
    def functions(self) -> list[tuple[str, Function]]:
        return [(name, node) for name, node in self.definitions if isinstance(node, Function)]


def main(words: list[str]) -> int:
    folder = Path(next((word for word in words if not word.startswith("-")), "src/shoal"))
    modules = [read(path, folder.parent) for path in sorted(folder.rglob("*.py"))]
    if "--check" not in words:
        report(modules)
    found = problems(modules, KNOWN)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


def read(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    return Module(name, path.stem == "__init__", text.splitlines(), ast.parse(text, str(path)))


def _definitions(node: ast.AST, inside: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        name = inside
        if isinstance(child, Function | ast.ClassDef):
            name = f"{inside}.{child.name}"
            yield name, child
        yield from _definitions(child, name)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def problems(modules: list[Module], known: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Say what breaks a limit, beyond what is known, and which known entries are no longer needed."""
    found = []
    if (median := statistics.median(len(module.lines) for module in modules)) > FILE_MEDIAN:
        found.append(f"lines of a file: the median is {median:.0f}, and at most {FILE_MEDIAN} are allowed")
    if (p90 := function_p90(modules)) > FUNCTION_P90:
        found.append(f"lines of a function: the 90th percentile is {p90}, and at most {FUNCTION_P90} are allowed")
    for kind, values in measure(modules).items():
        limit, excused = LIMITS[kind], known.get(kind, {})
        for name, value in values.items():
            if value > max(limit, excused.get(name, 0)):
                more = f" (KNOWN allows {excused[name]})" if name in excused else ""
                found.append(f"{kind}: {name} has {value}, and at most {limit} are allowed{more}")
        for name in excused:
            if values.get(name, 0) <= limit:
                found.append(f"{kind}: {name} is within the limit of {limit}: remove it from KNOWN")
    return found


def measure(modules: list[Module]) -> dict[str, dict[str, int]]:
    """Return each limited number of each file, class, function, folder and import cycle."""
    functions: dict[str, int] = {}
    parameter_counts: dict[str, int] = {}
    for name, function in (pair for module in modules for pair in module.functions):  # overloads share a name
        functions[name] = max(length(function), functions.get(name, 0))
        if not is_kernel(function):
            parameter_counts[name] = max(len(parameters(function)), parameter_counts.get(name, 0))
    definitions = [pair for module in modules for pair in module.definitions]
    return {
        "lines of a file": {module.name: len(module.lines) for module in modules},
        "lines of a function": functions,
        "lines of a class": {name: length(node) for name, node in definitions if isinstance(node, ast.ClassDef)},
        "parameters": parameter_counts,
        "modules": Counter(module.name.rpartition(".")[0] for module in modules if not module.is_package),
        "files in an import cycle": {" ".join(cycle): len(cycle) for cycle in cycles(modules)},
    }


def function_p90(modules: list[Module]) -> int:
    lengths = sorted(length(function) for module in modules for _, function in module.functions)
    return lengths[len(lengths) * 9 // 10] if lengths else 0


def length(node: Function | ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(function: Function) -> list[ast.arg]:
    spec = function.args
    named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    return [parameter for parameter in named if parameter.arg not in ("self", "cls")]


def is_kernel(function: Function) -> bool:
    """Whether Triton compiles a function. It takes pointers, strides and sizes one by one, and only the function beside
    it calls it: its parameters are no surface that a reader has to learn."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)


# ── imports ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def cycles(modules: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or by way of others, at any time."""
    names = {module.name for module in modules}
    reach = {module.name: imported(module.tree, names) - {module.name} for module in modules}
    for middle in reach:  # Warshall's closure
        for start in reach:
            reach[start] |= reach[middle] if middle in reach[start] else set()
    groups = {tuple(b for b in reach if b in reach[a] and a in reach[b]) for a in reach if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def imported(tree: ast.AST, names: set[str]) -> set[str]:
    """Return which of the named modules are imported anywhere in a tree, but not under `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in names else str(node.module) for name in submodules}
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found |= imported(ast.Module(node.orelse, []), names)
        else:
            found |= imported(node, names)
    return found & names


# ── report ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(modules: list[Module]) -> None:
    walked = ((module, node) for module in modules for node in ast.walk(module.tree))
    nodes = [(module, node) for module, node in walked if isinstance(node, ast.stmt | ast.expr)]
    functions = [(module, function) for module in modules for _, function in module.functions]
    sizes = [len(module.lines) for module in modules]
    median = statistics.median(length(function) for _, function in functions)
    print(f"lines                    {sum(sizes)} in {len(sizes)} files")
    print(f"lines per file           median {statistics.median(sizes):.0f}, max {max(sizes)}")
    print(f"lines per function       median {median:.0f}, p90 {function_p90(modules)}")
    print(f"annotated functions      {statistics.mean(is_annotated(function) for _, function in functions):.0%}")
    kinds = Counter(type(node) for _, node in nodes)
    print(f"raise : assert           {kinds[ast.Raise]} : {kinds[ast.Assert]}")

    def show_nodes(title: str, test: Callable[[ast.AST], bool]) -> None:
        show(title, [f"{m.name}:{n.lineno}  {m.lines[n.lineno - 1].strip()}" for m, n in nodes if test(n)])

    def show_over(limit: int, title: str, count: Callable[[Function], int]) -> None:
        show(title, [f"{m.name}:{f.lineno}  {f.name} {count(f)}" for m, f in functions if count(f) > limit])

    show("files over 300 lines", [f"{m.name} {len(m.lines)}" for m in modules if len(m.lines) > 300])
    show_over(60, "functions over 60 lines", length)
    show_over(3, "nesting over 3", nesting)
    show_over(6, "parameters over 6", lambda function: len(parameters(function)))
    show("import cycles", [" ".join(cycle) for cycle in cycles(modules)])
    show_nodes("imports in functions", lambda node: isinstance(node, Function) and any(map(is_import, ast.walk(node))))
    show_nodes("os.environ", lambda node: isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"))
    show_nodes("print", lambda node: isinstance(node, ast.Name) and node.id == "print")
    numbered = [(f"{module.name}:{number}", line) for module in modules for number, line in enumerate(module.lines, 1)]
    show("TODO without an issue", [f"{where}  {line.strip()}" for where, line in numbered if TODO.search(line)])


def show(title: str, found: list[str]) -> None:
    print("\n    ".join([f"{title:<24} {len(found)}", *found]))


def nesting(node: ast.AST) -> int:
    """The deepest block within block; an `elif` is no deeper than its `if`."""
    depths = [0]
    for child in ast.iter_child_nodes(node):
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        depths.append(nesting(child) + (isinstance(child, BLOCKS) and not is_elif))
    return max(depths)


def is_annotated(function: Function) -> bool:
    return function.returns is not None and all(parameter.annotation for parameter in parameters(function))


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
