"""A site in Flask."""

from flask import Flask

from tests.inbound.sites.config import CONFIG
from tidegate.inbound.wsgi import RateLimitMiddleware

app = Flask(__name__)
app.wsgi_app = RateLimitMiddleware(app.wsgi_app, config=CONFIG)  # type: ignore[method-assign]  # as Flask's own docs do


@app.get("/hello/<name>")
def hello(name):
    return f"hello {name}"


@app.get("/health")
def health():
    return "well"
