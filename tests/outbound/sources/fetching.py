"""A process that fetches one source once, and reports the result and the memory that it used."""

import asyncio
import json
import resource
import sys

from tidegate.outbound import Providers
from tidegate.outbound.sources import SourceRunner, read_source


async def fetch_once(data, settings):
    async with SourceRunner(Providers.of({"domain": "127.0.0.1", "limit": 100, "period": "1m"}), data=data) as service:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        service.add(read_source(settings))
        await service.start_due()  # one cycle
        await asyncio.gather(*service.tasks)  # and what it started
        (row,) = service.describe()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "result": row["last_result"],
        "ok": row["ok"],
        "failed": row["failed"],
        "megabytes": (after - before) / 1024,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(fetch_once(sys.argv[1], json.loads(sys.argv[2])))))  # noqa: T201 - its answer
