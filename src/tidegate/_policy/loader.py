"""The only YAML loader of this package: returns nodes with line numbers, within bounds.

A file may be untrusted, and a few lines of YAML can expand to billions of nodes. So aliases may add at most
`MAX_ALIASED_NODES` nodes, nodes are nested at most `MAX_DEPTH` levels deep (aliases included), and a file has at most
`MAX_BYTES`. Exceeding a bound is an error with the line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from tidegate.errors import ConfigError

MAX_ALIASED_NODES: Final = 10_000
MAX_DEPTH: Final = 100
MAX_BYTES: Final = 16 * 2**20
MISSING_COLON: Final = "could not find expected ':'"
MISSING_QUOTE: Final = "found unexpected end of stream"
FOUND_LATE: Final = (MISSING_COLON, MISSING_QUOTE)  # after the line with the mistake
ADVICE: Final = {
    "'\\t'": "indent with spaces, not tabs",
    "<block end>": "check the indentation",
    "mapping values are not allowed here": (
        "check the indentation, a space after each ':', and the quotes of a value that contains one"
    ),
    MISSING_COLON: "write a colon and a space after the name of a setting",
    MISSING_QUOTE: "close the quotes",
    "found character '": "put the value in quotes",
    "expected alphabetic or numeric character": "put a value that begins with * or & in quotes",
}  # by a part of what PyYAML reports


class InvalidYAMLError(ConfigError):
    """A file is not valid YAML; `problem` says why, and may quote a part of the file."""

    def __init__(self, problem: str, *, file: str | None = None, line: int | None = None) -> None:
        """Set the problem and its location."""
        super().__init__(f"is not valid YAML: {problem}", file=file, line=line)
        self.problem = problem


def read_text(path: str | Path) -> str:
    """Read a UTF-8 file of at most `MAX_BYTES`."""
    file = str(path)
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"is larger than {MAX_BYTES} bytes", file=file)
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", file=file) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not valid UTF-8 at byte {error.start}", file=file) from None


def compose(text: str, file: str | None = None) -> yaml.Node | None:
    """Parse one YAML document; `file` is its name in errors. No objects are constructed from tags."""
    try:
        loader = _BoundedLoader(text, file)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.context_mark if error.problem in FOUND_LATE else error.problem_mark or error.context_mark
        raise InvalidYAMLError(_describe(error), file=file, line=mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"the character U+{int(error.character):04X} is not allowed"
        raise InvalidYAMLError(problem, file=file, line=line) from None


def _describe(error: yaml.MarkedYAMLError) -> str:
    """Return what PyYAML reports about an error, with advice for the most frequent mistakes."""
    problem = str(error.problem or error.context)
    if problem.startswith("but ") and error.context:
        return f"{error.context}, {problem}"
    opened, found = error.context_mark, error.problem_mark
    if "while parsing a flow" in str(error.context) and opened and found and opened.line < found.line:
        return f"{problem}: the bracket opened on line {opened.line + 1} is not closed"
    advice = next((text for part, text in ADVICE.items() if part in problem), None)
    return f"{problem}: {advice}" if advice else problem


class _BoundedLoader(yaml.BaseLoader):
    """Counts nodes while they are composed, with every alias expanded."""

    def __init__(self, text: str, file: str | None) -> None:
        super().__init__(text)
        self._file = file
        self._nodes = 0  # so far, aliases expanded
        self._aliased = 0  # of these, nodes from aliases
        self._depth = 0
        self._deepest = 0  # deepest level so far within the current node
        self._extents: dict[int, tuple[int, int]] = {}  # by id of a node with an anchor: its number of nodes and levels

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:  # noqa: ANN401 - as in PyYAML
        """Compose a node; raise ConfigError if that would exceed a bound."""
        event = self.peek_event()  # type: ignore[no-untyped-call]  # PyYAML's stubs have no types here
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            node = super().compose_node(parent, index)
            self._expand(node, line)
            return node
        first, outer = self._nodes, self._deepest
        self._nodes += 1
        self._depth += 1
        self._deepest = self._depth
        self._check_depth(self._depth, line)
        node = super().compose_node(parent, index)
        if event.anchor is not None:
            self._extents[id(node)] = (self._nodes - first, self._deepest - self._depth + 1)
        self._depth -= 1
        self._deepest = max(outer, self._deepest)
        return node

    def _expand(self, node: yaml.Node | None, line: int) -> None:
        """Count the nodes of an alias."""
        extent = self._extents.get(id(node))
        if extent is None:
            raise ConfigError("an alias refers to a node that contains it", file=self._file, line=line)
        nodes, levels = extent
        self._nodes += nodes
        self._aliased += nodes
        if self._aliased > MAX_ALIASED_NODES:
            message = f"aliases expand to more than {MAX_ALIASED_NODES} nodes: use fewer aliases"
            raise ConfigError(message, file=self._file, line=line)
        self._deepest = max(self._deepest, self._depth + levels)
        self._check_depth(self._depth + levels, line)

    def _check_depth(self, depth: int, line: int) -> None:
        if depth > MAX_DEPTH:
            raise ConfigError(f"is nested more than {MAX_DEPTH} levels deep", file=self._file, line=line)
