"""Creates the schema on first use and migrates an older one: the first process does it, all others wait."""

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
APPLY_STATEMENT: Final = (
    "select tidegate.apply($1::text[], $2::int[], $3::text[], $4::text[], $5::int[], "
    "$6::tidegate.limit_t[], $7::bigint[], $8::bigint[], $9::bigint[], $10::int)"
)


class Schema(NamedTuple):
    """The name of the schema and its SQL: one step per version, then the functions."""

    name: str
    steps: tuple[str, ...]
    core: str
    statement: bytes

    @property
    def digest(self) -> str:
        """Identify the version of the functions."""
        return hashlib.sha256(self.core.encode()).hexdigest()

    def check_flow(self, connection: Connection, until: int) -> IOFlow[bool]:
        """Return whether the schema is up to date. Raises StoreUnavailable if it is from a newer tidegate."""
        sql = f'select version, core from "{self.name}".schema_version'  # noqa: S608 - SCHEMA_NAME allows only identifiers
        try:
            result = (yield from connection.query_flow("read its schema's version", sql, until))[-1]
        except ServerError as error:
            if error.code in MISSING_SCHEMA_CODES:
                return False
            raise connection.explain("read its schema's version", str(error), error.code) from None
        return self._is_current(result.get_value(0, 0), result.get_value(0, 1)) if result.ntuples else False

    def _is_current(self, version: bytes | None, core: bytes | None) -> bool:
        if int(version or 0) > len(self.steps):
            message = (
                f"the schema {self.name!r} in PostgreSQL has version {int(version or 0)}, from a newer tidegate; "
                f"this tidegate supports version {len(self.steps)}: upgrade it, or set another schema in the URL"
            )
            raise StoreUnavailable(message)
        return int(version or 0) == len(self.steps) and core == self.digest.encode()

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
                sql = f'select version, core from "{self.name}".schema_version'  # noqa: S608 - as above
                result = (yield from connection.query_flow(action, sql, until))[-1]
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
        parts += self.steps[done:]
        parts.append(self.core)
        parts.append(
            f'delete from "{self.name}".schema_version; '  # noqa: S608 - SCHEMA_NAME allows only identifiers
            f"insert into \"{self.name}\".schema_version values ({len(self.steps)}, '{self.digest}');\n"
        )
        return "\n".join(parts)


def read_schema(name: str = "tidegate", *, unlogged: bool = False) -> Schema:
    """Read the SQL files of this package, for a schema of this name."""
    if not SCHEMA_NAME.fullmatch(name) or name.startswith("pg_"):
        raise ConfigError(f"must consist of lower-case letters, digits and _, not {name!r}", field="schema")
    here = files(__package__)
    tables, core = ((here / file).read_text(encoding="utf-8") for file in ("schema.sql", "core.sql"))
    if unlogged:
        tables = tables.replace("create table", "create unlogged table")
    steps = re.split(r"^-- version \d+\n", tables, flags=re.MULTILINE)[1:]

    def qualify(sql: str) -> str:
        return re.sub(r"\btidegate\.", f'"{name}".', sql)

    return Schema(name, tuple(map(qualify, steps)), qualify(core), qualify(APPLY_STATEMENT).encode())
