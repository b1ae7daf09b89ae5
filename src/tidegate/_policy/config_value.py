"""ConfigValue: a value of a configuration, with its file, line and field.

A ConfigValue wraps one value of a YAML file or of a mapping. The method that reads it states the expected type:

    section = load("config.yaml").fields("enabled", "limits")      # a mapping with these keys and no others
    section["enabled"].boolean()
    [entry.string() for entry in section["limits"].items()]          # a list of strings

A value of another type raises ConfigError, such as `config.yaml:3: limits[0]: expected a string, not a list`. Because
the reader states the type, `no` is false where a boolean is expected and the string "no" where a string is.

Only the simple part of YAML is supported: mappings, lists, scalars and anchors. Duplicate keys, tags and a second
document are errors. No object is constructed from a tag, and the expansion of aliases is bounded (see `loader`), so
reading an untrusted file is safe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

import yaml

from tidegate._policy.loader import compose, read_text
from tidegate._runtime.suggestions import did_you_mean, hint
from tidegate._runtime.urls import redact_text
from tidegate.core._bounds import MAX_INTEGER
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BOOLEANS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NULL_WORDS: Final = ("", "~", "null", "Null", "NULL")
INTEGER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*")
NUMBER = re.compile(r"[-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?")
DECIMAL = re.compile(r"(?P<whole>[0-9]+(?:_[0-9]+)*)(?:\.(?P<part>[0-9]{1,6})0*)?")
PLAIN_TAGS: Final = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
MAX_SHOWN_LENGTH: Final = 60  # characters of a value in an error message


def load(source: str | Path | Mapping[str, object]) -> ConfigValue:
    """Read a YAML file, or wrap a mapping."""
    if isinstance(source, Mapping):
        return ConfigValue(source)
    try:
        text = read_text(source)
    except ConfigError:
        raise
    except (TypeError, ValueError):
        message = f"expected a file path or a mapping, not {_shown(source)}"
        raise ConfigError(message, field="config") from None
    return parse(text, str(source))


def parse(text: str, file: str | None = None) -> ConfigValue:
    """Parse YAML; `file` is its name in errors."""
    node = compose(text, file)
    return ConfigValue(node, file, node.start_mark.line + 1 if node else 1)


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """One value and its location. `raw` is a YAML node or a Python value; use the methods to read it."""

    raw: Any
    file: str | None = None
    line: int | None = None
    field: str | None = None

    def error(self, message: str) -> ConfigError:
        """Return a ConfigError with the location of this value."""
        return ConfigError(message, file=self.file, line=self.line, field=self.field)

    @contextmanager
    def locate_errors(self, **fields: ConfigValue | None) -> Iterator[None]:
        """Add the location of this value to ConfigErrors, or that of the field they name, if it is given."""
        try:
            yield
        except ConfigError as error:
            place = fields.get(error.field or "")
            if place is not None:
                raise place.error(str(error).removeprefix(f"{error.field}: ")) from None
            raise self.error(str(error)) from None

    @property
    def is_null(self) -> bool:
        """Whether the value is null (or empty)."""
        return self.raw is None or self._plain in NULL_WORDS

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping."""
        return isinstance(self.raw, (yaml.MappingNode, Mapping))

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return isinstance(self.raw, yaml.SequenceNode) or (
            isinstance(self.raw, Sequence) and not isinstance(self.raw, (str, bytes))
        )

    def entries(self) -> dict[str, ConfigValue]:
        """Read a mapping with any keys, in order; a duplicate key is an error."""
        self._check_tag()
        if not self.is_mapping:
            raise self.error(f"expected a mapping, not {self}")
        found: dict[str, ConfigValue] = {}
        for key, value, line in self._pairs():
            place = f"{self.field}.{key}" if self.field else key
            if key in found:
                message = f"duplicate key, first set on line {found[key].line}"
                raise ConfigError(message, file=self.file, line=line, field=place)
            found[key] = ConfigValue(value, self.file, line, place)
        return found

    def fields(self, *known: str) -> dict[str, ConfigValue]:
        """Read a mapping that may have the known keys and no others."""
        found = self.entries()
        for key, value in found.items():
            if key not in known:
                advice = did_you_mean(key, known) or f"expected one of {', '.join(known)}"
                raise value.error(f"unknown setting: {advice}")
        return found

    def items(self) -> list[ConfigValue]:
        """Read a list."""
        self._check_tag()
        if not self.is_list:
            raise self.error(f"expected a list, not {self}")
        if not isinstance(self.raw, yaml.SequenceNode):
            return [ConfigValue(value, self.file, self.line, f"{self.field}[{i}]") for i, value in enumerate(self.raw)]
        return [
            ConfigValue(node, self.file, node.start_mark.line + 1, f"{self.field}[{i}]")
            for i, node in enumerate(self.raw.value)
        ]

    def one_or_many(self) -> list[ConfigValue]:
        """Read a list, or a single value in place of a list of one."""
        return self.items() if self.is_list else [self]

    def string(self) -> str:
        """Read a non-empty string."""
        value = self._scalar
        if not isinstance(value, str) or not value or self.is_null:
            raise self.error(f"expected a string, not {self}")
        return str(value)

    def choice(self, *choices: str) -> str:
        """Read one of several strings."""
        word = self._scalar
        if word not in choices:
            listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise self.error(f"expected {listed}, not {self}{hint(word, choices)}")
        return str(word)

    def boolean(self) -> bool:
        """Read a boolean: true or false (or yes, no, on, off)."""
        value = self.raw if isinstance(self.raw, bool) else BOOLEANS.get((self._plain or "").lower())
        if value is None:
            raise self.error(f"expected true or false, not {self}")
        return value

    def integer(self, low: int = 1, high: int = MAX_INTEGER) -> int:
        """Read an integer within bounds."""
        value = self.raw
        if self._plain is not None and INTEGER.fullmatch(self._plain):
            value = int(self._plain) if len(self._plain) <= MAX_SHOWN_LENGTH else high + 1
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            too_large = isinstance(value, int) and value > high
            bounds = f"from {low} to {high}" if high < MAX_INTEGER or too_large else f"of at least {low}"
            raise self.error(f"expected an integer {bounds}, not {self}")
        return value

    def number(self) -> float:
        """Read a number above 0, integer or not."""
        value = self.raw
        if self._plain is not None and NUMBER.fullmatch(self._plain) and len(self._plain) <= MAX_SHOWN_LENGTH:
            value = float(self._plain)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= MAX_INTEGER:
            raise self.error(f"expected a number above 0, not {self}")
        return value

    def millionths(self) -> int:
        """Read a decimal number of at least 0 with at most six decimals, exactly, in millionths: 2.5 is 2,500,000."""
        text = self._plain if self._plain is not None else str(self.raw)
        if isinstance(self.raw, float):  # str(0.00005) is 5e-05
            text = f"{Decimal(repr(float(self.raw))):f}"
        number = DECIMAL.fullmatch(text) if not isinstance(self.raw, (bool, str)) else None
        if number is None or len(text) > MAX_SHOWN_LENGTH:
            raise self.error(f"expected a number of at least 0 with at most six decimals, not {self}")
        found = int(number["whole"]) * 10**6 + int((number["part"] or "0").ljust(6, "0"))
        if found > MAX_INTEGER:
            raise self.error(f"expected a number of at most {MAX_INTEGER // 10**6}, not {self}")
        return found

    def __str__(self) -> str:
        """Return the value as error messages show it."""
        if self.is_null:
            return "null"
        if self.is_mapping:
            return "a mapping"
        if self.is_list:
            return "a list"
        plain = self._plain
        if plain and (NUMBER.fullmatch(plain) or plain.lower() in BOOLEANS):
            return plain[:MAX_SHOWN_LENGTH]
        return _shown(self._scalar)

    @property
    def _scalar(self) -> Any:  # noqa: ANN401 - any Python value
        """The string of a YAML scalar, quoted or not; a Python value unchanged."""
        return self.raw.value if isinstance(self.raw, yaml.ScalarNode) else self.raw

    @property
    def _plain(self) -> str | None:
        """The string of an unquoted YAML scalar: it may be a number, a boolean or null."""
        self._check_tag()
        return str(self.raw.value) if isinstance(self.raw, yaml.ScalarNode) and self.raw.style is None else None

    def _pairs(self) -> Iterator[tuple[str, object, int | None]]:
        if isinstance(self.raw, Mapping):
            for key, value in self.raw.items():
                if isinstance(key, int) and not isinstance(key, bool):
                    key = str(key)  # noqa: PLW2901 - as a YAML file has it
                if not isinstance(key, str):
                    raise self.error(f"keys must be strings, not {_shown(key)}")
                yield key, value, self.line
            return
        for key, value in self.raw.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self.error("keys must be strings, not lists or mappings")
            yield key.value, value, key.start_mark.line + 1

    def _check_tag(self) -> None:
        if isinstance(self.raw, yaml.Node) and self.raw.tag not in PLAIN_TAGS:
            raise self.error(f"unsupported tag {self.raw.tag}: remove it")


def _shown(value: object) -> str:
    """Return a value for an error message, shortened and without secrets."""
    text = redact_text(repr(value))
    return text if len(text) <= MAX_SHOWN_LENGTH else f"{text[:MAX_SHOWN_LENGTH]}…"
