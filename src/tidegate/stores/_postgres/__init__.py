"""Keeps states in PostgreSQL, for any number of processes and machines: one round trip, one transaction per call.

store.py       PostgresStore, and opening it from a URL
pool.py        a few connections for all threads and event loops of a process
heartbeat.py   checks a silent server with a heartbeat
call.py        encodes calls and decodes answers
connection.py  a connection to the server, and its errors
io_flow.py     the steps that wait, and how threads and tasks execute them
schema.py      creates the tables (schema.sql) and the functions (core.sql: the core in PL/pgSQL)
"""

from tidegate.stores._postgres.store import PostgresStore, open_postgres

__all__ = ["PostgresStore", "open_postgres"]
