"""How a setting is declared: once, as a field of a dataclass.

    max_wait: float = setting(30.0, read_seconds, "maximum time that a call may wait for a permit", DURATION)

The name in the file, the environment variable, the command-line option, the JSON schema and the table in the docs
follow from this declaration.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tidegate._policy.config_value import ConfigValue
from tidegate._policy.durations import format_exact_duration
from tidegate._policy.setting_values import FULL_PERCENT, read_string_file
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Read = Callable[[ConfigValue], Any]
    Check = Callable[[Any], str | None]


class Kind(NamedTuple):
    """What the value of a setting is: its JSON schema, for editors, and its name in the help of the option."""

    schema: Mapping[str, object]
    metavar: str = "TEXT"
    unit: str = ""

    def with_bounds(self, **bounds: object) -> Kind:
        """Return a kind with a stricter schema."""
        return self._replace(schema={**self.schema, **bounds})


STRING_SCHEMA: Final[dict[str, Any]] = {"type": "string", "minLength": 1}
STRINGS_SCHEMA: Final[dict[str, Any]] = {"anyOf": [STRING_SCHEMA, {"type": "array", "items": STRING_SCHEMA}]}
STRING: Final = Kind(STRING_SCHEMA)
URL: Final = Kind(STRING_SCHEMA, "URL")
PERCENTS: Final = Kind({"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": FULL_PERCENT}})
PATH: Final = Kind(STRING_SCHEMA, "FILE")
PATHS: Final = Kind(STRINGS_SCHEMA, "FILE")
ADDRESS: Final = Kind({"type": ["string", "integer"]}, "ADDRESS")
DURATION: Final = Kind({"type": ["string", "number"]}, "TIME", "s")
BOOLEAN: Final = Kind({"type": "boolean"}, "BOOL")
INTEGER: Final = Kind({"type": "integer", "minimum": 1}, "N")
BYTES: Final = Kind({"type": "integer", "minimum": 1}, "BYTES", "bytes")
COMMON_GROUP: Final = "common settings"  # `tidegate start --help` shows only these, `--help-all` all of them
STORE_GROUP: Final = "limits and store"
OTHER_GROUP: Final = "processes, bounds and other settings"


def choice(*values: str, metavar: str = "MODE") -> Kind:
    """Return the kind of a setting with these values."""
    return Kind({"enum": list(values)}, metavar)


class DeclaredSetting(NamedTuple):
    """A setting as users set it."""

    name: str
    read: Read
    summary: str
    kind: Kind
    default: str  # in words; "": none is shown
    group: str = OTHER_GROUP  # in the help
    secret: bool = False  # has no option: other users can read the command line of a process
    many: bool = False  # a list; its option is the name in the singular and may be repeated
    link: str = ""  # to a page of docs/, from reference/
    in_file: bool = False  # the setting with this name, without `_file`, is read from a file, because it is secret
    variable: str = ""  # the environment variable, if its name does not follow from that of the setting
    check: Check | None = None  # of values that are given in Python; default: `read` checks them, too

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value that is given in Python, or None."""
        if self.check is not None:
            return self.check(value)
        try:
            self.read(ConfigValue(value, field=self.name))
        except ConfigError as error:
            return error.detail
        return None

    @property
    def schema(self) -> dict[str, object]:
        """The JSON schema, with the help as description."""
        return {**self.kind.schema, "description": self.help}

    @property
    def flag(self) -> str:
        """The command-line option."""
        return "--" + (self.name.removesuffix("s") if self.many else self.name).replace("_", "-")

    @property
    def help(self) -> str:
        """The help text of the option, and the description in the JSON schema."""
        default = f" (default: {self.default})" if self.default else ""
        return self.summary + (" (may be repeated)" if self.many else default)


class Declaration(NamedTuple):
    """The metadata of a field of Settings: without its name, which is that of the field."""

    option: DeclaredSetting
    file: tuple[Read, str] | None


def setting(
    default: Any,  # noqa: ANN401 - of the type of the field
    read: Read,
    summary: str,
    kind: Kind = STRING,
    *,
    shown: str | None = None,
    group: str = OTHER_GROUP,
    secret: bool = False,
    private: bool = False,
    many: bool = False,
    link: str = "",
    file: str | tuple[Read, str] | None = None,
    variable: str = "",
    check: Check | None = None,
) -> Any:  # noqa: ANN401 - as dataclasses.field
    """Declare a setting: a field of a dataclass.

    `shown` describes the default in words. A `private` value is not in the repr. With `file`, a second setting, whose
    name ends in `_file`, reads the value from a file: `file` is its summary, or its reader and its summary.
    """
    words = describe_default(default, kind) if shown is None else shown
    option = DeclaredSetting("", read, summary, kind, words, group, secret, many, link, variable=variable, check=check)
    from_file = (read_string_file, file) if isinstance(file, str) else file
    metadata = {"setting": Declaration(option, from_file)}
    shows = not (secret or private)
    if isinstance(default, dict):
        return field(default_factory=default.copy, repr=shows, metadata=metadata)
    return field(default=default, repr=shows, metadata=metadata)


def describe_default(default: object, kind: Kind) -> str:
    """Return a default as the help and the docs show it."""
    if default is None or default in ((), {}):
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return format_exact_duration(default) if kind is DURATION else str(default)  # type: ignore[arg-type]  # seconds


def options_of(settings: type) -> tuple[DeclaredSetting, ...]:
    """Return the options of all settings that a class declares, in order."""
    found: list[DeclaredSetting] = []
    for each in fields(settings):
        declared: Declaration | None = each.metadata.get("setting")
        if declared is None:
            continue
        option, file = declared
        found.append(option._replace(name=each.name))
        if file is not None:
            group = STORE_GROUP if option.group == COMMON_GROUP else option.group
            found.append(DeclaredSetting(f"{each.name}_file", file[0], file[1], PATH, "", group, in_file=True))
    return tuple(found)
