"""Measure how the package is built: ``python tools/structure.py [ROOT] [--draw PATH]``.

Prints, of the checkout in ROOT (by default the one this script lies in), which may be an older one:

- the lines and files of the package, and the files in its largest folder;
- lines with comments, by folder, and private functions that are named at most once elsewhere;
- circles of imports, between modules and between folders, those at any depth and under
  ``TYPE_CHECKING`` included;
- private names of torch, tensordict and torchrl used outside the adapter, and those that one
  module of the package uses of another: see ``tools/private_names.py``.

``--draw`` paints the folders, their sizes and who imports whom, with matplotlib.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE))

from tools.private_names import private_uses_in  # noqa: E402

Graph = dict[str, set[str]]
_BLANK = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by the dotted names of their modules."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def n_lines(path: Path) -> int:
    """Return how many lines a file has."""
    return len(path.read_text().splitlines())


def import_graph(package: Path) -> Graph:
    """Return which module imports which, at any depth of its text."""
    files = modules(package)
    graph: Graph = {}
    for name, path in files.items():
        targets = {_module(target, files) for target in imports(path, name)}
        graph[name] = targets - {None, name}
    return graph


COMPUTED = "<computed>"  # a name that is not in the text
_DYNAMIC = re.compile(r"\b(import_module|__import__)$")


def imports(path: Path, module: str) -> set[str]:
    """Return the dotted names that a module imports, at any depth; "a.b" for "from a import b"."""
    targets = set()
    parents = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and re.search(_DYNAMIC, ast.unparse(node.func)):
            targets |= {str(getattr(arg, "value", COMPUTED)) for arg in node.args[:1]}
    return targets


def _module(target: str, files: dict[str, Path]) -> str | None:
    """Return the module that a name imported lies in: itself, or what it is a part of."""
    parts = target.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in files), None)


def top_folder(module: str) -> str:
    """Return the folder of a module: what stands after the package's name; "" for its own file."""
    return [*module.split("."), ""][1]


def top_folders(graph: Graph) -> Graph:
    """Return which folder imports which. The package's own file imports all, and is left out."""
    found: Graph = defaultdict(set)
    for module, targets in graph.items():
        if own := top_folder(module):
            found[own] |= {top_folder(target) for target in targets} - {own, ""}
    return dict(found)


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that can all be reached from each other."""
    reach = {node: _reachable(graph, node) for node in graph}
    groups = {tuple(sorted(m for m in reach[n] if n in reach.get(m, ()))) for n in graph}
    return [list(group) for group in sorted(groups) if group]


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


# Statements, and how many lines of the package an interpreter may execute for them.
CLOSURES = {
    "from gfn_rb import SoftmaxRewardSampler": 3_900,
    "from gfn_rb import RewardPrioritizedWriter": 6_850,
    "from gfn_rb import fifo_buffer": 11_600,
    "import gfn_rb": 13_000,
}
# Each statement runs in a fork of one interpreter that has made the imports of others.
_LOADED = """
import json, os, sys
import torchrl.data
for statement in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        exec(statement)
        modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "gfn_rb"]
        print(json.dumps([m.__file__ for m in modules if getattr(m, "__file__", None)]))
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, statement
"""


def closures(root: Path, statements: Iterable[str]) -> dict[str, list[Path]]:
    """Return the files of the package that a fresh interpreter executes for each statement."""
    statements, environment = [*statements], {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", _LOADED, json.dumps(statements)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    files = map(json.loads, done.stdout.splitlines())
    return {
        statement: [*map(Path, each)] for statement, each in zip(statements, files, strict=True)
    }


def part_lines(root: Path) -> dict[str, int]:
    """Return the lines of library, application and tests."""
    application = sum(map(n_lines, (root / "gfn_rb" / "training").rglob("*.py")))
    library = sum(map(n_lines, (root / "gfn_rb").rglob("*.py"))) - application
    tests = sum(map(n_lines, (root / "tests").rglob("*.py")))
    return {"library": library, "application": application, "tests": tests}


def comment_share(paths: Iterable[Path]) -> float:
    """Return how many lines with comments there are for 100 lines of code, without docstrings."""
    n_comments = n_code = 0
    for path in paths:
        text = path.read_text()
        docs = {
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        comments, code = set[int](), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments.add(token.start[0])
            elif token.type not in _BLANK:
                code |= {*range(token.start[0], token.end[0] + 1)}
        n_comments += len(comments)
        n_code += len(code - docs)
    return 100 * n_comments / max(n_code, 1)


def named_once(package: Path) -> list[str]:
    """Return the private functions that are named at most once beside their definition.

    Decorated ones are left out, since numba compiles functions, and so are names that several
    classes define, since a base class may call them all at one place.
    """
    trees = [ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = Counter(getattr(node, "id", getattr(node, "attr", None)) for node in nodes)
    functions = [
        node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    defined = Counter(each.name for each in functions)
    plain = [each.name for each in functions if not each.decorator_list and each.name[0] == "_"]
    return sorted(
        name for name in plain if name[1] != "_" and defined[name] == 1 and uses[name] <= 1
    )


def report(root: Path) -> None:
    """Print all that is measured."""
    package = root / "gfn_rb"
    files, graph = modules(package).values(), import_graph(package)
    folders = Counter(path.parent.relative_to(root) for path in files)
    folder, largest = folders.most_common(1)[0]
    print(f"lines: {sum(map(n_lines, files))}")
    for part, n in part_lines(root).items():
        print(f"lines of {part}: {n}")
    for statement, executed in closures(root, CLOSURES).items():
        n = sum(map(n_lines, executed))
        print(f"lines executed by '{statement}': {n} of {CLOSURES[statement]}")
    for each in sorted(path for path in package.iterdir() if [*path.glob("*.py")]):
        share = comment_share(each.rglob("*.py"))
        print(f"lines with comments per 100 lines of code in {each.name}: {share:.1f}")
    print(f"private functions named at most once elsewhere: {len(named_once(package))}")
    print(f"files: {len(files)}")
    print(f"files in the largest folder: {largest} ({folder})")
    _list("circles of modules", [" <-> ".join(circle) for circle in circles(graph)])
    _list("circles of folders", [" <-> ".join(circle) for circle in circles(top_folders(graph))])
    uses = private_uses_in(package, HERE / "gfn_rb")
    for what, foreign in (("foreign private names", True), ("private names of others", False)):
        found = [(path, use) for path, each in uses.items() for use in each]
        chosen = [f"{path.relative_to(root)}:{u}" for path, u in found if u.is_foreign is foreign]
        _list(f"{what} outside the adapter" if foreign else what, chosen)


def _list(what: str, items: list[str]) -> None:
    print(f"{what}: {len(items)}")
    for item in items:
        print(f"    {item}")


def draw(root: Path, path: Path) -> None:
    """Paint the folders in layers; an arrow goes to what is imported, unless others lead there.

    Modules that import no other, such as the names of errors and keys, are known to all folders:
    they stand at the top, without arrows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    package = root / "gfn_rb"
    graph = top_folders(import_graph(package))
    sizes: dict[str, list[int]] = defaultdict(list)
    for module, file in modules(package).items():
        sizes[top_folder(module)].append(n_lines(file))
    graph.pop("__main__", None)
    common = {name for name in graph if not graph[name] and len(sizes[name]) == 1}
    graph = {name: targets - common for name, targets in graph.items() if name not in common}
    layers = [sorted(common), *_layers(graph)]
    figure, axes = plt.subplots(figsize=(11, 1.2 * len(layers)))
    at = {}
    for level, layer in enumerate(layers):
        for i, name in enumerate(layer):
            n = len(sizes[name])
            text = f"{name}\n{sum(sizes[name])} lines" + (f", {n} files" if n > 1 else "")
            style = {"boxstyle": "round,pad=0.45", "fc": "#eef3fa", "ec": "#34567a"}
            at[name] = (11 * (i + 0.5) / len(layer), -1.2 * level)
            axes.text(*at[name], text, ha="center", va="center", fontsize=9, bbox=style)
    for name, targets in graph.items():
        for target in targets - set().union(*(_reachable(graph, each) for each in targets)):
            (x, y), (x_target, y_target) = at[name], at[target]
            arrow = {"arrowstyle": "->", "color": "#7a8ba0"}
            axes.annotate(
                "", (x_target, y_target - 0.27), (x, y + 0.27), arrowprops=arrow, zorder=1
            )
    axes.set(xlim=(0, 11), ylim=(0.5 - 1.2 * len(layers), 0.6))
    axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})


def _layers(graph: Graph) -> list[list[str]]:
    """Return the folders, each below all that it imports: users at the end."""
    depth: dict[str, int] = {}
    while len(depth) < len(graph):
        ready = [n for n in graph if n not in depth and graph[n] <= depth.keys()]
        if not ready:
            raise SystemExit(f"folders import each other in circles: {circles(graph)}")
        for name in ready:
            depth[name] = max((depth[target] + 1 for target in graph[name]), default=0)
    return [sorted(n for n in graph if depth[n] == d) for d in range(max(depth.values()) + 1)]


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=HERE)
    parser.add_argument("--draw", type=Path, metavar="PATH")
    arguments = parser.parse_args()
    report(arguments.root.resolve())
    if arguments.draw:
        draw(arguments.root.resolve(), arguments.draw)


if __name__ == "__main__":
    main()
