"""`flask tidegate limits` lists each route with the limits that apply to it."""

import pytest
from flask import Blueprint, Flask
from flask.views import MethodView

from tidegate.inbound import wsgi
from tidegate.inbound.flask import commands, exempt, limit


class Classy(MethodView):
    @limit("4/1m")
    def get(self):
        return "read"

    def post(self):
        return "written"


def plan(_request):
    return "1/1m"


@pytest.fixture
def app():
    app, reports = Flask("site", static_folder=None), Blueprint("reports", "site", url_prefix="/reports")
    limit("30/1m")(reports)
    app.add_url_rule("/plain/<int:number>", "plain", lambda number: f"{number}")
    app.add_url_rule(
        "/own", "own", limit("5/1m")(limit(["9/1h", "50/1d"], name="slow", per_method=True)(lambda: "own"))
    )
    app.add_url_rule("/posted", "posted", limit("3/1m", methods=["POST"])(lambda: "posted"), methods=["GET", "POST"])
    app.add_url_rule("/plan", "plan", limit(plan, override_defaults=False, mode="shadow")(lambda: "plan"))
    app.add_url_rule("/free", "free", exempt(lambda: "free"))
    app.add_url_rule("/classy", view_func=Classy.as_view("classy"))
    reports.add_url_rule("/daily", "daily", lambda: "daily")
    app.register_blueprint(reports)
    app.cli.add_command(commands)
    return app


def listed(app):
    result = app.test_cli_runner().invoke(args=["tidegate", "limits"])
    assert result.exit_code == 0, result.output
    route, found = "", {}
    for line in result.output.splitlines():
        if line.startswith(" "):
            found[route].append(line.strip())
        else:
            route = line
            found[route] = []
    return found


def test_the_limits_of_views_and_blueprints(app):
    assert listed(app) == {
        "GET /classy": ["view by_address/1m  4/1m"],
        "POST /classy": ["no limit"],
        "GET /free": ["exempt from the limits of the middleware"],
        "GET /own": ["view by_address/1m  5/1m", "view slow  9/1h, 50/1d; per method"],
        "GET /plain/<int:number>": ["no limit"],
        "GET /plan": ["view by_address/dynamic  by plan; shadow"],
        "GET /posted": ["no limit"],
        "POST /posted": ["view by_address/1m POST  3/1m"],
        "GET /reports/daily": ["blueprint by_address/1m  30/1m"],
    }


def test_the_limits_of_the_middleware(app):
    numbers = {"limit": 7, "window": "1m", "endpoints": ["/plain/{number:int}"]}
    app.wsgi_app = wsgi.RateLimitMiddleware(
        app.wsgi_app,
        {"categories": {"numbers": numbers}},
        default_limits="2/1m",
        application_limits=limit("9/1d", methods=["GET"], exempt_when=lambda request: False),
    )
    found = listed(app)
    application = "application_limits  9/1d; exempt_when"
    assert found["GET /plain/<int:number>"] == ["numbers  7/1m", application, "default_limits  2/1m"]
    assert found["GET /own"][:1] == [application]
    assert "default_limits  2/1m" not in found["GET /own"]
    assert found["GET /posted"] == [application, "default_limits  2/1m"]
    assert found["POST /posted"] == ["view by_address/1m POST  3/1m"]
    assert found["GET /plan"] == [application, "default_limits  2/1m", "view by_address/dynamic  by plan; shadow"]
    assert found["GET /free"] == ["exempt from the limits of the middleware"]
    assert found["POST /classy"] == ["default_limits  2/1m"]


def test_what_is_listed_is_what_applies(app):
    app.wsgi_app = wsgi.RateLimitMiddleware(app.wsgi_app, default_limits="2/1m", application_limits="90/1d")
    client = app.test_client()
    for route, path in [("GET /own", "/own"), ("GET /posted", "/posted"), ("GET /reports/daily", "/reports/daily")]:
        tightest = min(int(line.split("  ")[1].split("/")[0]) for line in listed(app)[route])
        assert client.get(path).headers["X-RateLimit-Limit"] == str(tightest)
