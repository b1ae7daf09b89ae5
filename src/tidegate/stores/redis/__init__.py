"""Keeps states in Redis or Valkey: the core runs there as a script (core.lua), with the server's clock.

wire.py turns calls into scripts and answers into decisions; threads.py and tasks.py (cluster_tasks.py) send them, many
calls at a time; marker.py notices that a server has lost its keys; address.py and driver.py know URLs and redis-py.
"""

from tidegate.stores.redis.store import RedisStore, open_redis

__all__ = ["RedisStore", "open_redis"]
