"""The log of a real server, whose clients were limited, replays to the denials that they met."""

import asyncio

import httpx
import pytest
import uvicorn

from tests.plan.drivers import LOG_FORMAT
from tests.servers.nginx import TEMPLATE, Nginx
from tests.servers.process import until
from tests.servers.thread import ThreadServer
from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.plan._clock import ReplayClock
from tidegate.plan._logs.formats import LogOptions
from tidegate.plan._logs.stream import LogStream
from tidegate.plan._replay import Replay, Replays
from tidegate.plan._rules.inbound import InboundRules

# All permits are back half a second before Retry-After, in whole seconds, lets a client come back: the milliseconds
# between nginx and the middleware decide nothing.
CONFIG = {
    "categories": {
        "log": {"limits": ["4/1500ms sliding_log"], "endpoints": ["/log"]},
        "bucket": {"limits": ["6/1500ms token_bucket", "40/1h"], "endpoints": ["/bucket"]},
        "slots": {"limits": ["2/1h concurrency"], "endpoints": ["/slow"]},
    }
}
SITE = """    log_format plan '{format}';
    server {{
        listen 127.0.0.1:{port};
        access_log access.log plan;
        location / {{
            proxy_pass http://127.0.0.1:{app};
            proxy_set_header X-Forwarded-For $remote_addr;
        }}
    }}
"""


class LimitedSite(ThreadServer):
    """A middleware in uvicorn, whose responses to /slow end after a request of /release."""

    async def _serve(self):
        self._stop, self.release, self.slow = asyncio.Event(), asyncio.Event(), 0
        app = RateLimitMiddleware(self.respond, CONFIG, trusted_proxies=["127.0.0.1"], admin=False)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", proxy_headers=False, lifespan="off"))
        serving = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.should_exit = True
        await serving
        await app.close()

    async def respond(self, scope, _receive, send):
        if scope["path"] == "/release":
            self.release.set()
        if scope["path"] == "/slow":
            self.slow += 1
            await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class RecordingNginx(Nginx):
    """An nginx that writes the log that the documentation recommends."""

    files = ()

    def __init__(self, app):
        super().__init__(app, app)
        text = SITE.format(format=LOG_FORMAT.replace("$http_x_forwarded_for", "-"), port=self.port, app=app)
        (self.folder / "nginx.conf").write_text(TEMPLATE.format(text=text))


async def call(url, address, path):
    """Send two bursts, the second after the Retry-After of the first; return the statuses."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address=address), timeout=30) as client:
        first = [await client.get(url + path) for _ in range(9)]
        await asyncio.sleep(int(first[-1].headers.get("Retry-After", "0")))  # a real client has no virtual time
        second = [await client.get(url + path) for _ in range(9)]
    return [each.status_code for each in first + second]


async def call_slow(url, site):
    """Use all slots, be denied, and let the first requests end; return the statuses."""
    async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(local_address="127.0.0.5"), timeout=30) as client:
        first = [asyncio.ensure_future(client.get(url + "/slow")) for _ in range(2)]
        await asyncio.to_thread(until, lambda: site.slow == 2, "two requests in the application")
        denied = await client.get(url + "/slow")
        await client.get(url + "/release")
        done = [each.status_code for each in await asyncio.gather(*first)]
        again = await client.get(url + "/slow")
        return [*done, denied.status_code, 200, again.status_code]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of uvicorn's implementation of websockets
def test_the_log_of_a_real_server_replays_to_the_denials_of_its_clients():
    async def run(url, site):
        addresses = {"127.0.0.2": "/log", "127.0.0.3": "/bucket", "127.0.0.4": "/log"}
        calls = [call(url, address, path) for address, path in addresses.items()]
        return [status for each in await asyncio.gather(*calls, call_slow(url, site)) for status in each]

    with LimitedSite() as site, RecordingNginx(site.port) as nginx:
        met = asyncio.run(run(f"http://127.0.0.1:{nginx.port}", site))
        log = nginx.folder / "access.log"
        until(lambda: log.read_text().count("\n") > len(met), "the last line of the log")  # and the pings of the start
        replay = Replay(InboundRules(CONFIG, ReplayClock()))
        replayed = [
            (row[3], replay.decide(row).allowed)
            for rows in LogStream([log], LogOptions(log_format=LOG_FORMAT)).read(Replays([replay]))
            for row in rows
        ]
        replay.finish()
    assert met.count(429) > 6
    assert sum(status == 429 for status, _ in replayed) == met.count(429)
    assert [allowed for _, allowed in replayed] == [status != 429 for status, _ in replayed]
