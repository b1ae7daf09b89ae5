"""A site with metrics of all workers."""

import os

from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tidegate.inbound.asgi import RateLimitMiddleware
from tidegate.observe.prometheus import PrometheusObserver, worker_registry


async def page(_request):
    return PlainTextResponse("page")


class WorkerName:
    """Adds the process id of the worker to each response."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def named(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-worker", str(os.getpid()).encode())]
            await send(message)

        await self.app(scope, receive, named)


CONFIG = {
    "defaults": False,
    "unmatched": None,
    "categories": {"pages": {"limit": 10, "window": "1h", "endpoints": ["/page"]}},
}
site = Starlette(routes=[Route("/page", page), Mount("/metrics", make_asgi_app(registry=worker_registry()))])
app = WorkerName(RateLimitMiddleware(site, CONFIG, store=os.environ["STORE"], observer=PrometheusObserver()))
