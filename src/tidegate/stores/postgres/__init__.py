"""Keeps states in PostgreSQL, for any number of processes and machines: one round trip, one transaction per call.

store.py       what the rest of tidegate sees: a Store, and the URL that opens it
pool.py        a few connections for all threads and event loops of a process
pulse.py       asks a server that is silent for a sign of life
calls.py       a call as the server is sent it, and as it is answered
connection.py  talks to the server, and says in our words what went wrong
steps.py       the two loops that wait, one for threads and one for tasks
schema.py      creates and migrates: schema.sql (tables, views), core.sql (the core in PL/pgSQL)
"""

from tidegate.stores.postgres.store import PostgresStore, open_postgres

__all__ = ["PostgresStore", "open_postgres"]
