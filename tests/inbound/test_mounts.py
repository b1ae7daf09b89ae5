"""Mounted applications, and routes that the framework has matched before the middleware."""

import pytest
from starlette.routing import Mount

from tests.inbound.harness import AsgiHarness, WsgiHarness


def test_a_root_path_of_the_server_does_not_change_categories():
    api = AsgiHarness()
    for _ in range(5):
        assert api.request("/v1/api/cluster", root_path="/v1")["x-ratelimit-limit"] == "5"
    assert api.request("/v1/api/cluster", root_path="/v1").status == 429
    assert api.request("/v1/api/feeds", root_path="/v1").status == 200
    api.close()
    wsgi = WsgiHarness()
    assert wsgi.statuses(6, "/api/cluster", SCRIPT_NAME="/v1") == [200] * 5 + [429]


def test_endpoints_may_include_the_mount_point():
    api = AsgiHarness()
    assert api.request("/api/cluster", root_path="/api")["x-ratelimit-limit"] == "5"
    api.close()
    assert WsgiHarness().request("/cluster", SCRIPT_NAME="/api")["x-ratelimit-limit"] == "5"


@pytest.mark.parametrize("path", ["/api/cluster", "api/cluster", "//api/cluster"])
def test_a_missing_or_doubled_slash_after_the_mount_point_does_not_avoid_limits(path):
    """gunicorn under SCRIPT_NAME=/pre makes `api/cluster` of GET /preapi/cluster; Flask serves /api/cluster."""
    wsgi = WsgiHarness()
    assert wsgi.statuses(5, "/api/cluster", SCRIPT_NAME="/pre") == [200] * 5
    assert wsgi.request(path, SCRIPT_NAME="/pre").status == 429
    api = AsgiHarness()
    assert api.statuses(5, "/pre/api/cluster", root_path="/pre") == [200] * 5
    assert api.request(f"/pre{path}", root_path="/pre").status == 429
    api.close()


def test_endpoints_may_include_a_part_of_nested_mount_points():
    limits = {"strict": {"limit": 1, "endpoints": ["/outer/inner/a", "/inner/b", "/c"]}}
    api = AsgiHarness({"categories": limits})
    root = {"root_path": "/outer/inner", "app_root_path": "/outer"}
    for path in "abc":
        assert api.request(f"/outer/inner/{path}", **root, peer=f"203.0.113.{ord(path)}")["x-ratelimit-limit"] == "1"
    api.close()


def test_the_most_specific_endpoint_wins_with_and_without_prefix(make_app):
    """`/*` is less specific than an endpoint of a route, with or without the prefix."""
    categories = {
        "all": {"limit": 7, "endpoints": ["/*"]},
        "some": {"limit": 9, "endpoints": ["/items/*"]},
        "one": {"limit": 8, "endpoints": ["/v1/items/7"]},
    }
    api = make_app({"categories": categories})
    for path, limit in (("/items/1", "9"), ("/items/7", "8"), ("/other", "7")):
        assert mounted(api, path)["x-ratelimit-limit"] == limit


def mounted(api, path, root="/v1", **more):
    """Send a request to an application mounted under a root."""
    if isinstance(api, AsgiHarness):
        return api.request(root + path, root_path=root, **more)
    return api.request(path, SCRIPT_NAME=root, **more)


class ScopeRoute:
    """A route as routers store it in the scope."""

    def __init__(self, path):
        self.path = path
        self.endpoint = None


def test_a_route_matched_by_the_framework_selects_the_category():
    config = {"categories": {"heavy": {"limit": 2, "endpoints": ["/feed/{name}/cluster"]}}}
    api = AsgiHarness(config)
    route = ScopeRoute("/feed/{id}/cluster")
    assert [api.request(f"/elsewhere/{i}", route=route).status for i in range(3)] == [200, 200, 429]
    assert api.request("/feed/9/cluster")["x-ratelimit-limit"] == "2"
    api.close()


def test_a_mount_in_the_scope_is_not_a_route():
    """Starlette stores the mount before it matches the route; the mount's path must not select the category."""
    api = AsgiHarness({"defaults": True, "categories": {"lax": {"limit": 10**6, "endpoints": ["/sub"]}}})
    mount = Mount("/sub", AsgiHarness().app)
    for path, limit in (("/sub/api/cluster", "5"), ("/sub", "1000000")):
        assert api.request(path, route=mount, root_path="/sub")["x-ratelimit-limit"] == limit
    api.close()
