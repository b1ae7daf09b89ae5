"""A site for gunicorn's preload_app: what it limits by is made, and used, in the parent of the workers."""

import os
from wsgiref.util import setup_testing_defaults

from tidegate.inbound.wsgi import RateLimitMiddleware


def answer(_environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]


READ = {"limit": 40, "window_minutes": 1440, "on_store_error": "deny"}  # "local" charges double among newcomers
CONFIG = {"categories": {"read": READ}, "exempt": ["/health"]}
app = RateLimitMiddleware(answer, config=CONFIG, store=os.environ["STORE"], lease=bool(os.environ["LEASE"]))

request = {"REMOTE_ADDR": "127.0.0.1"}
setup_testing_defaults(request)
assert b"".join(app(request, lambda *_: None)) == str(os.getpid()).encode()  # connections are open when gunicorn forks
