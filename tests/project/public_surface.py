"""Finds what the package makes public: modules without an underscore, their `__all__`, and the signatures."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(__file__).parents[2] / "src"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A module of the package."""

    name: str
    is_package: bool
    tree: ast.Module

    @property
    def public_names(self) -> tuple[str, ...] | None:
        """The names in `__all__`; None: there is none."""
        for statement in self.tree.body:
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
                return tuple(ast.literal_eval(statement.value))
        return None

    def definition(self, name: str) -> ast.stmt | None:
        """The class, function or alias of a name that this module defines."""
        for statement in statements_of(self.tree):
            if isinstance(statement, (ast.ClassDef, *FUNCTIONS)) and statement.name == name:
                return statement
            if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return statement
        return None

    def imported(self, name: str) -> tuple[str, str] | None:
        """The module and the name that a name was imported from, at the top or for type checkers only."""
        for statement in statements_of(self.tree):
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return statement.module, alias.name
        return None


def statements_of(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements at the top of a module, also those inside `if` and `try`."""
    waiting = list(tree.body)
    while waiting:
        statement = waiting.pop(0)
        yield statement
        if isinstance(statement, (ast.If, ast.Try)):
            waiting += statement.body


def is_interior(module: str) -> bool:
    """Return whether the name of a module says that it is not public."""
    return any(part.startswith("_") for part in module.split("."))


@cache
def modules() -> dict[str, Module]:
    """All modules of the package, by name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, is_package, ast.parse(path.read_text(encoding="utf-8")))
    return found


def public_modules() -> dict[str, tuple[str, ...]]:
    """The names in `__all__` of each module and package without an underscore in its name, by module."""
    return {
        name: names
        for name, module in modules().items()
        if not is_interior(name) and (names := module.public_names) is not None
    }


def resolve(module: str, name: str) -> tuple[Module, ast.stmt] | None:
    """Find where a name of a module is defined; None: outside the package."""
    while module in modules():
        home = modules()[module]
        definition = home.definition(name)
        if definition is not None:
            return home, definition
        imported = home.imported(name)
        if imported is None:
            return None
        module, name = imported
    return None


@dataclass(frozen=True)
class Signature:
    """A function or method that users call, or the declared attributes of a class."""

    module: Module
    name: str
    annotations: tuple[ast.expr, ...]
    options: ast.expr | None = None  # the annotation of `**options`


def signature_of(module: Module, name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> Signature:
    """Return the annotations of a function."""
    arguments = function.args
    all_arguments = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [each.annotation for each in all_arguments if each is not None]
    found = tuple(each for each in (*annotations, function.returns) if each is not None)
    return Signature(module, name, found, arguments.kwarg.annotation if arguments.kwarg else None)


def signatures(module: Module, definition: ast.stmt) -> Iterator[Signature]:
    """The signatures of a function, or of the public methods and attributes of a class and its bases."""
    if isinstance(definition, FUNCTIONS):
        yield signature_of(module, definition.name, definition)
    if not isinstance(definition, ast.ClassDef):
        return
    for member in definition.body:
        if isinstance(member, FUNCTIONS) and (
            not member.name.startswith("_") or member.name in {"__init__", "__call__", "__enter__", "__aenter__"}
        ):
            yield signature_of(module, f"{definition.name}.{member.name}", member)
        if isinstance(member, ast.AnnAssign) and not ast.unparse(member.target).startswith("_"):
            yield Signature(module, f"{definition.name}.{ast.unparse(member.target)}", (member.annotation,))
    for base in definition.bases:
        inner = base.value if isinstance(base, ast.Subscript) else base
        found = resolve(module.name, inner.id) if isinstance(inner, ast.Name) else None
        if found is not None:
            yield from signatures(*found)


def public_signatures() -> dict[str, Signature]:
    """All public signatures, by their full name."""
    found = {}
    for module, names in public_modules().items():
        for name in names:
            definition = resolve(module, name)
            if definition is not None:
                for signature in signatures(*definition):
                    found[f"{signature.module.name}.{signature.name}"] = signature
    return found
