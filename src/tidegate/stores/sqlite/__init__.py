"""Keeps states in an SQLite file: durable, shared by all processes and threads of one machine, without any server.

store.py    SQLiteStore: one write transaction per decision, in which the Python core runs
rows.py     how states stand in rows
log.py      a log as rows, for the core: every look-up touches a few of them, however long the log is
file.py     opening the file, its schema and migrations; what its errors mean and what to do
worker.py   the async form: a thread of its own, decisions that wait together share a transaction
*.sql       the schema, step by step
"""

from tidegate.stores.sqlite.store import SQLiteStore, open_sqlite

__all__ = ["SQLiteStore", "open_sqlite"]
