"""Keeps states in an SQLite file: durable, shared by all processes and threads of one machine, without a server.

store.py          SQLiteStore: one write transaction per call, in which the Python core decides
rows.py           reads and writes states as rows
log_rows.py       a log as rows, for the core: a search reads a few rows, however long the log is
database.py       opens the file, creates its tables, explains its errors
async_worker.py   the async form: a thread that decides the calls of many tasks in shared transactions
schema.sql        its tables and views
"""

from tidegate.stores._sqlite.store import SQLiteStore, Synchronous, open_sqlite

__all__ = ["SQLiteStore", "Synchronous", "open_sqlite"]
