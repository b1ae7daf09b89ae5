"""Write the Python blocks of the README and of each page in docs/ to a folder, for type checkers.

The blocks of a page share their names. From the first block on that uses `await`, they are the body of a coroutine
function. Where a block imports a name that another block imported from elsewhere, as pages for several frameworks do, a
function begins that contains the rest of the page and has its own meaning for the name. Lines keep the numbers that
they have in the page: build/examples/docs_concepts_waiting.py:30 is docs/concepts/waiting.md:30. A block with a title,
which readers save as a file, is a module of its own.
"""

from __future__ import annotations

import ast
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.docs.blocks import blocks_of  # noqa: E402 - found in ROOT

INDENT = "    "


def imports_of(code: str) -> dict[str, str]:
    """Return the import statement of each name that a block imports at its top level."""
    tree = compile(code, "<block>", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = {}
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            found.update({alias.asname or alias.name: f"import {ast.unparse(alias)}" for alias in statement.names})
        elif isinstance(statement, ast.ImportFrom):
            module = statement.module
            found.update({a.asname or a.name: f"from {module} import {ast.unparse(a)}" for a in statement.names})
    return found


def awaits(code: str) -> bool:
    """Return whether a block uses `await`, `async with` or `async for` outside functions."""
    try:
        compile(code, "<block>", "exec")
    except SyntaxError:
        return True
    return False


def extract(page: Path) -> str:
    """Return the Python blocks of a page as one module; an empty string if it has none."""
    lines: list[str] = []
    imported: dict[str, str] = {}
    indent = ""
    for block in blocks_of(page):
        if block.label != "python" or block.recipe or block.title:  # the SDKs of recipes are not installed
            continue
        lines += [""] * (block.line - 1 - len(lines))
        new = imports_of(block.code)
        conflict = any(imported.get(name, statement) != statement for name, statement in new.items())
        if conflict or (not indent and awaits(block.code)):
            lines[-1] = f"{indent}async def page_{block.line}() -> None:"  # instead of the opening fence
            indent += INDENT
        imported |= new
        lines += [f"{indent}{line}" if line else "" for line in block.code.split("\n")]
    return "\n".join([*lines, ""]) if lines else ""


def is_installed(code: str) -> bool:
    """Return whether all packages that a block imports are installed; a tutorial may need the SDK of a vendor."""
    return all(find_spec(statement.split()[1].partition(".")[0]) for statement in imports_of(code).values())


def main(folder: str) -> None:
    """Write one module per page."""
    target = ROOT / folder
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
        module = extract(page)
        if module:
            (target / f"{name}.py").write_text(module, encoding="utf-8")
        for block in blocks_of(page):
            if block.label == "python" and block.title and is_installed(block.code):
                lines = "\n" * (block.line - 1) + block.code + "\n"
                (target / f"{name}_{block.line}.py").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
