"""Creates the tables and the functions on first use: the first process does it, all others wait.

The tables have a schema, and the functions of each version of tidegate have another one beside it: `tidegate` and
`tidegate_v4`. So two versions can share the tables during a rolling upgrade, and each calls its own functions. The
tables have a version, too, which changes with their format; a process refuses tables of another version.

Each session holds a shared lock of its functions. So `tidegate doctor --fix` drops only functions that no process uses.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from tidegate.errors import ConfigError, StoreUnavailable
from tidegate.stores._postgres.connection import ServerError

if TYPE_CHECKING:
    from tidegate.stores._postgres.connection import Connection
    from tidegate.stores._postgres.io_flow import IOFlow

TABLES_VERSION: Final = 4  # of schema.sql
FUNCTIONS_VERSION: Final = 4  # of core.sql
MARKER: Final = "functions of tidegate"  # the comment of a schema that `drop_flow` may drop
MISSING_SCHEMA_CODES: Final = ("42P01", "3F000")  # no such table, no such schema
SCHEMA_NAME: Final = re.compile(r"(?!pg_|.*_v[0-9]+$)[a-z_][a-z0-9_]{0,49}")
UNLOGGED: Final = "alter table keys set unlogged; alter table log set unlogged; alter table stored_values set unlogged;"


class Schema(NamedTuple):
    """The name of the schema of the tables, their SQL, and the SQL and version of the functions."""

    name: str
    tables: str
    core: str
    version: int = FUNCTIONS_VERSION

    @property
    def functions(self) -> str:
        """The name of the schema of the functions."""
        return f"{self.name}_v{self.version}"

    @property
    def session_settings(self) -> str:
        """The SQL that selects the functions for a session, and keeps them from being dropped until it ends.

        `pg_catalog` is always searched first, and `pg_temp` too unless it is named.
        """
        lock = functions_lock(f"'{self.functions}'")
        return f'set search_path = "{self.functions}", "{self.name}", pg_temp; select pg_advisory_lock_shared({lock})'

    def check_flow(self, connection: Connection, until: int) -> IOFlow[bool]:
        """Return whether tables and functions exist. Raises StoreUnavailable if the tables have another version."""
        action = "read its schema's version"
        query = f'select version, {self._has_functions} from "{self.name}".schema_version'  # noqa: S608 - SCHEMA_NAME allows only identifiers
        try:
            result = (yield from connection.query_flow(action, query, until))[-1]
        except ServerError as error:
            if error.code in MISSING_SCHEMA_CODES:
                return False
            raise connection.explain(action, str(error), error.code) from None
        version = int(result.get_value(0, 0) or 0)
        if version != TABLES_VERSION:
            age = "a newer" if version > TABLES_VERSION else "an older"
            message = (
                f"the schema {self.name!r} in PostgreSQL has version {version}, from {age} tidegate; "
                f"this tidegate supports version {TABLES_VERSION}: use the tidegate that wrote it, "
                "or set another schema in the URL"
            )
            raise StoreUnavailable(message)
        return result.get_value(0, 1) == b"t"

    @property
    def _has_functions(self) -> str:
        return f"to_regproc('\"{self.functions}\".apply') is not null"

    def create_flow(self, connection: Connection, until: int) -> IOFlow[None]:
        """Create what is missing in one transaction, one process at a time."""
        action = f"create its schema {self.name!r}"
        lock = (
            "begin; set local statement_timeout = '60s'; "
            f"select pg_advisory_xact_lock(hashtextextended('tidegate schema {self.name}', 0)); "
            f"select to_regnamespace('\"{self.name}\"') is not null, "
            f"to_regclass('\"{self.name}\".schema_version') is not null, "
            f"to_regnamespace('\"{self.functions}\"') is not null, {self._has_functions}"
        )
        try:
            found = (yield from connection.query_flow(action, lock, until))[-1]
            missing = [part for i, part in enumerate(self._parts) if found.get_value(0, i) != b"t"]
            yield from connection.query_flow(action, f"{''.join(missing)}commit;", until)
        except ServerError as error:
            raise connection.explain(action, str(error), error.code) from None

    @property
    def _parts(self) -> tuple[str, str, str, str]:
        """The SQL that creates both schemas and their contents. `create schema if not exists` would need privileges."""
        tables, functions = f'"{self.name}"', f'"{self.functions}"'
        version = f"insert into schema_version values ({TABLES_VERSION});"  # noqa: S608 - an integer
        # The functions run with the rights of the caller, so that anyone may use them.
        marked = f"comment on schema {functions} is '{MARKER}'; grant usage on schema {functions} to public;"
        return (
            f"create schema {tables};",
            f"set local search_path = {tables}, pg_temp;\n{self.tables}\n{version}",
            f"create schema {functions}; {marked}",
            f"set local search_path = {functions}, {tables}, pg_temp;\n{self.core}\n",
        )

    def outdated_flow(self, connection: Connection, until: int, *, drop: bool) -> IOFlow[dict[str, bool]]:
        """Find the functions of older versions, and whether a session uses them; with `drop`, drop the others."""
        action = "drop functions of older versions" if drop else "find functions of older versions"
        query = (
            "begin; select nspname, pg_try_advisory_xact_lock("  # noqa: S608 - SCHEMA_NAME allows only identifiers
            f"{functions_lock('nspname')}) from pg_namespace "
            f"where nspname ~ '^{self.name}_v[0-9]+$' and obj_description(oid, 'pg_namespace') = '{MARKER}' "
            f"and substring(nspname from '[0-9]+$')::numeric < {self.version} "
            "order by substring(nspname from '[0-9]+$')::numeric"
        )
        try:
            rows = (yield from connection.query_flow(action, query, until))[-1]
            found = {(rows.get_value(i, 0) or b"").decode(): rows.get_value(i, 1) != b"t" for i in range(rows.ntuples)}
            for name, in_use in found.items():
                if drop and not in_use:
                    yield from connection.query_flow(action, drop_functions(name), until)
            yield from connection.query_flow(action, "commit", until)
        except ServerError as error:
            raise connection.explain(action, str(error), error.code) from None
        return found


def functions_lock(name: str) -> str:
    """Return the arguments of the advisory lock of functions, in SQL. Keys have locks with one argument."""
    return f"hashtext('tidegate functions'), hashtext({name})"


def drop_functions(name: str) -> str:
    """Return SQL that drops a schema with functions; it fails if the schema has anything else."""
    return (
        "do $$ declare each regprocedure; begin "  # noqa: S608 - the name of an existing schema of ours
        f"for each in select oid from pg_proc where pronamespace = '\"{name}\"'::regnamespace loop "
        f"execute format('drop function %s', each); end loop; end $$; drop schema \"{name}\";"
    )


def read_schema(name: str = "tidegate", *, unlogged: bool = False) -> Schema:
    """Read the SQL files of this package, for tables in a schema of this name."""
    if not SCHEMA_NAME.fullmatch(name):
        message = f"must consist of lower-case letters, digits and _, at most 50, and not end in _v1, not {name!r}"
        raise ConfigError(message, field="schema")
    here = files(__package__)
    tables, core = ((here / file).read_text(encoding="utf-8") for file in ("schema.sql", "core.sql"))
    return Schema(name, f"{tables}{UNLOGGED}" if unlogged else tables, core)
