"""No module of `tidegate.inbound` imports another in a cycle, imports for types and inside functions included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
PACKAGE = "tidegate.inbound"


def read_modules(folder, package):
    """Return the syntax tree of each module of a package, by name."""
    found = {}
    for path in folder.joinpath(*package.split(".")).rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports_of(tree, known):
    """Return which of the known modules a module imports: `from package import module` imports the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known:
                    yield name
                elif node.module in known:
                    yield node.module


def find_cycle(modules):
    """Return the modules of an import cycle; None if there is none."""
    graph = {name: set(imports_of(tree, modules)) - {name} for name, tree in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_inbound_has_no_import_cycle():
    assert find_cycle(read_modules(SOURCE, PACKAGE)) is None


@pytest.mark.parametrize(
    ("second", "cycle"),
    [
        ("import a", True),
        ("if TYPE_CHECKING:\n    from a import X", True),
        ("def f():\n    import a", True),
        ("", False),
    ],
)
def test_a_cycle_is_found(second, cycle):
    modules = {"a": ast.parse("from b import Y"), "b": ast.parse(second)}
    assert (find_cycle(modules) is not None) is cycle
