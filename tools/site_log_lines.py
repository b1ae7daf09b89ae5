"""Finds every message that the package logs, in its code, for the reference of the site."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.project.public_surface import Module, modules  # noqa: E402 - found in ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LEVELS: Final = ("debug", "info", "warning", "error", "exception", "critical", "log")
THROTTLED: Final = "log_throttled"  # a method that passes its arguments on to `log.log`
PLACEHOLDER: Final = re.compile(r"%(?:\.\d+)?[sdgfr]")
# Messages that other functions compose, or that are no sentences: by module and function.
COMPOSED: Final = {
    ("tidegate.budget._operations", "__init__"): ["a warning about a tier that can never be reached"],
    ("tidegate.egress._access_log", "write"): ["one JSON object for each call"],
}


class LogLine(NamedTuple):
    """A message that the code logs."""

    logger: str
    level: str
    message: str


def log_calls() -> Iterator[tuple[Module, ast.Call, list[str]]]:
    """Return every call that logs, with its possible messages."""
    for module in modules().values():
        for function in ast.walk(module.tree):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and function.name != THROTTLED:
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and is_log_call(call):
                        arguments = call.args[1:] if method_of(call) in {"log", THROTTLED} else call.args
                        found = list(messages_of(arguments, function, module))
                        yield module, call, found or COMPOSED.get((module.name, function.name), [])


def log_lines() -> list[LogLine]:
    """Find every message that the package logs."""
    calls = [(logger_of(module.name, module.tree), level_of(call), texts) for module, call, texts in log_calls()]
    return sorted({LogLine(logger, level, text) for logger, level, texts in calls for text in texts})


def silent_calls() -> list[str]:
    """Return the calls whose messages are not known."""
    return [f"{module.name}:{call.lineno}" for module, call, texts in log_calls() if not texts]


def method_of(call: ast.Call) -> str:
    """Return the method of a call that logs."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def level_of(call: ast.Call) -> str:
    """Return the level of a call that logs."""
    method = method_of(call)
    if method in {"log", THROTTLED}:
        level = ast.unparse(call.args[0])
        return level.removeprefix("logging.") if level.startswith("logging.") else "INFO or higher"
    return "ERROR" if method == "exception" else method.upper()


def is_log_call(call: ast.Call) -> bool:
    """Return whether a call logs a message."""
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr not in (*LEVELS, THROTTLED):
        return False
    if function.attr == THROTTLED:
        return True
    logger = ast.unparse(function.value)
    return logger in {"log", "logger", "self._logger", "self._log", "self.log"} or logger.endswith(".outage_log")


def messages_of(arguments: Sequence[ast.expr], function: ast.AST, module: Module) -> Iterator[str]:
    """Return the possible messages of a call, with … in place of their values."""
    for text in strings_of(arguments[0], function, module) if arguments else ():
        if PLACEHOLDER.sub("", text).strip(" :"):
            yield " ".join(PLACEHOLDER.sub("…", text).replace("%%", "%").split())
        else:  # only values: the message is one of them
            for argument in arguments[1:]:
                yield from messages_of([argument], function, module)


def strings_of(node: ast.expr, function: ast.AST, module: Module) -> list[str]:
    """Return the strings that an expression can be."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.JoinedStr):
        return ["".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)]
    if isinstance(node, ast.IfExp):
        return [*strings_of(node.body, function, module), *strings_of(node.orelse, function, module)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        ends = strings_of(node.right, function, module)
        return [start + end for start in strings_of(node.left, function, module) for end in ends]
    values: list[ast.expr] = []
    if isinstance(node, ast.Name):
        values = [each.value for each in ast.walk(function) if isinstance(each, ast.Assign) and names(each, node.id)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        methods = [each for each in ast.walk(module.tree) if getattr(each, "name", None) == node.func.attr]
        returns = [each for method in methods for each in ast.walk(method) if isinstance(each, ast.Return)]
        values = [each.value for each in returns if each.value is not None]
    return [text for value in values for text in strings_of(value, function, module)]


def names(statement: ast.Assign, name: str) -> bool:
    """Return whether an assignment sets a name."""
    return any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)


def logger_of(name: str, tree: ast.Module) -> str:
    """Return the name of the logger of a module."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "logging.getLogger" and call.args:
            argument = call.args[0]
            if isinstance(argument, ast.Constant):
                return str(argument.value)
            if ast.unparse(argument) == "__name__":
                return name
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "log" for alias in statement.names):
            home = modules().get(statement.module or "")
            if home is not None:
                return logger_of(home.name, home.tree)
    return ".".join(name.split(".")[:2])
