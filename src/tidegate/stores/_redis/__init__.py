"""Keeps states in Redis or Valkey: the core runs there as a library of functions (core.lua), with the server's clock.

store.py           RedisStore
library.py         core.lua as a library, or as a script where functions are forbidden
protocol.py        encodes calls and decodes replies as decisions
sync_pipeline.py   sends the calls of threads, many at a time
async_pipeline.py  sends the calls of tasks, many at a time
async_cluster.py   sends the calls of tasks to a cluster
sync_cluster.py    sends the calls of threads to a cluster
cluster.py         which server of a cluster has which slot
reply_reader.py    opens the connections of tasks and parses replies
late_replies.py    reads replies that arrive after their calls timed out
address.py         parses URLs
driver.py          the adapter to redis-py
"""

from tidegate.stores._redis.address import RedisAddress
from tidegate.stores._redis.store import RedisStore, open_redis

__all__ = ["RedisAddress", "RedisStore", "open_redis"]
