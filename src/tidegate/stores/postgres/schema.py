"""Creates the schema on first use and migrates an older one: the first process does it, all others wait.

During a rolling upgrade, two versions of tidegate use one schema. The tables have a version, which changes only with
their format; a process refuses tables with a higher version. The functions have a suffix, made from their source
(`apply_3f2a9c01b7de`), so that each version calls its own. Version 0.1 has functions without a suffix; it also uses the
column `core` of `schema_version`.
"""

from __future__ import annotations

import hashlib
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.stores.postgres.connection import ServerError

if TYPE_CHECKING:
    from tidegate.stores.postgres.connection import Connection
    from tidegate.stores.postgres.io_flow import IOFlow

MISSING_SCHEMA_CODES: Final = ("42P01", "3F000")  # no such table, no such schema
SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
FUNCTION = re.compile(r'^create or replace function "[^"]+"\.(\w+)\(', re.MULTILINE)
SUFFIX_LENGTH: Final = 12  # hexadecimal digits
APPLY_STATEMENT: Final = (
    "select tidegate.apply($1::text[], $2::int[], $3::text[], $4::text[], $5::int[], "
    "$6::tidegate.limit_t[], $7::bigint[], $8::bigint[], $9::bigint[], $10::int)"
)


class Schema(NamedTuple):
    """The name of the schema and its SQL: one step per version of the tables, functions, views and the statement."""

    name: str
    steps: tuple[str, ...]
    core: str
    views: str
    statement: str

    @property
    def suffix(self) -> str:
        """Identify the version of the functions and views."""
        return hashlib.sha256((self.core + self.views).encode()).hexdigest()[:SUFFIX_LENGTH]

    def add_suffix(self, sql: str) -> str:
        """Return SQL that calls, or creates, the functions of this version."""
        names = "|".join(FUNCTION.findall(self.core))
        # A function refers to its parameters by its own name, too: `store.key`.
        return re.sub(rf'("{self.name}"\.(?:{names})\b|(?<![\w.])(?:{names})(?=\.))', rf"\1_{self.suffix}", sql)

    def expand(self, sql: str) -> bytes:
        """Return SQL about the schema `tidegate` as SQL about this schema and its functions of this version."""
        return self.add_suffix(qualify(sql, self.name)).encode()

    def check_flow(self, connection: Connection, until: int) -> IOFlow[bool]:
        """Return whether the schema is up to date. Raises StoreUnavailable if it is from a newer tidegate."""
        try:
            result = (yield from connection.query_flow("read its schema's version", self._version_query, until))[-1]
        except ServerError as error:
            if error.code in MISSING_SCHEMA_CODES:
                return False
            raise connection.explain("read its schema's version", str(error), error.code) from None
        return self._is_current(result.get_value(0, 0), result.get_value(0, 1)) if result.ntuples else False

    @property
    def _version_query(self) -> str:
        apply = self.add_suffix(f'"{self.name}".apply')
        return f"select version, to_regproc('{apply}') is not null from \"{self.name}\".schema_version"  # noqa: S608 - SCHEMA_NAME allows only identifiers

    def _is_current(self, version: bytes | None, has_functions: bytes | None) -> bool:
        if int(version or 0) > len(self.steps):
            message = (
                f"the schema {self.name!r} in PostgreSQL has version {int(version or 0)}, from a newer tidegate; "
                f"this tidegate supports version {len(self.steps)}: upgrade it, or set another schema in the URL"
            )
            raise StoreUnavailable(message)
        return int(version or 0) == len(self.steps) and has_functions == b"t"

    def migrate_flow(self, connection: Connection, until: int) -> IOFlow[None]:
        """Create or migrate the schema in one transaction, one process at a time."""
        action = f"create or migrate its schema {self.name!r}"
        lock = (
            "begin; set local statement_timeout = '60s'; "
            f"select pg_advisory_xact_lock(hashtextextended('tidegate schema {self.name}', 0)); "
            f"select to_regnamespace('\"{self.name}\"') is not null, "
            f"to_regclass('\"{self.name}\".schema_version') is not null"
        )
        try:
            found = (yield from connection.query_flow(action, lock, until))[-1]
            has_schema, has_version = (found.get_value(0, i) == b"t" for i in (0, 1))
            done = 0
            if has_version:
                result = (yield from connection.query_flow(action, self._version_query, until))[-1]
                done = int(result.get_value(0, 0) or 0)
                if self._is_current(result.get_value(0, 0), result.get_value(0, 1)):
                    yield from connection.query_flow(action, "commit", until)
                    return
            yield from connection.query_flow(action, self.script(done, has_schema=has_schema) + "commit;", until)
        except ServerError as error:
            raise connection.explain(action, str(error), error.code) from None

    def script(self, done: int = 0, *, has_schema: bool = False) -> str:
        """Return the SQL that migrates from version `done` to the latest."""
        parts = [] if has_schema else [f'create schema "{self.name}";']
        if not done:
            parts.append(f'create table "{self.name}".schema_version (version int not null, core text not null);')
            parts.append(f"insert into \"{self.name}\".schema_version values (0, '');")  # noqa: S608 - as above
        parts += self.steps[done:]
        parts += (self.add_suffix(self.core), self.add_suffix(self.views))
        parts.append(f'update "{self.name}".schema_version set version = {len(self.steps)};\n')  # noqa: S608 - as above
        return "\n".join(parts)


def read_schema(name: str = "tidegate", *, unlogged: bool = False) -> Schema:
    """Read the SQL files of this package, for a schema of this name."""
    if not SCHEMA_NAME.fullmatch(name) or name.startswith("pg_"):
        raise ConfigError(f"must consist of lower-case letters, digits and _, not {name!r}", field="schema")
    here = files(__package__)
    sources = ("schema.sql", "core.sql", "views.sql")
    tables, core, views = ((here / file).read_text(encoding="utf-8") for file in sources)
    if unlogged:
        tables = tables.replace("create table", "create unlogged table")
    steps = re.split(r"^-- version \d+\n", tables, flags=re.MULTILINE)[1:]

    return Schema(
        name,
        tuple(qualify(step, name) for step in steps),
        qualify(core, name),
        qualify(views, name),
        qualify(APPLY_STATEMENT, name),
    )


def qualify(sql: str, name: str) -> str:
    """Replace the name of the schema in SQL."""
    return re.sub(r"\btidegate\.", f'"{name}".', sql)
