"""A site whose workers share limits: each path is a limit of its own, and each response names the process."""

import os

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tidegate.inbound.asgi import RateLimitMiddleware


async def page(_request):
    return PlainTextResponse(str(os.getpid()))


def category(path):
    return {"limit": 10, "window": "1h", "endpoints": [path], "on_store_error": os.environ["ON_STORE_ERROR"]}


CONFIG = {
    "defaults": False,
    "unmatched": None,
    "categories": {"first": category("/first"), "second": category("/second")},
}
site = Starlette(routes=[Route("/first", page), Route("/second", page), Route("/free", page)])
app = RateLimitMiddleware(site, CONFIG, store=os.environ["STORE"])
