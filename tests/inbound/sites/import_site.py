"""A route with a limit of two per hour, among routes with a high limit: in Flask, Quart and Starlette."""

from flask import Flask
from quart import Quart
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from tidegate.inbound import asgi, wsgi

CONFIG = {
    "categories": {
        "import": {"limit": 2, "window": "1h", "endpoints": ["/import/{name}"]},
        "read": {"limit": 1000, "window": "1h"},
    }
}

flask_app = Flask("import_site")
flask_app.add_url_rule("/import/<name>", view_func=lambda name: f"imported {name}", endpoint="import")
flask_app.wsgi_app = wsgi.RateLimitMiddleware(flask_app.wsgi_app, CONFIG)  # type: ignore[method-assign]  # as Flask's own docs do

quart_app = Quart("import_site")


@quart_app.get("/import/<name>")
async def imported(name: str) -> str:
    return f"imported {name}"


quart_app.asgi_app = asgi.RateLimitMiddleware(quart_app.asgi_app, CONFIG)  # type: ignore[method-assign]  # as Quart's own docs do


async def endpoint(request):
    return PlainTextResponse(f"imported {request.path_params['name']}")


inner = asgi.RateLimitMiddleware(Starlette(routes=[Route("/import/{name}", endpoint)]), CONFIG)
starlette_app = Starlette(routes=[Mount("/pre", inner)])
