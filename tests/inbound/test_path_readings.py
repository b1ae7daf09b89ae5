"""Paths with several readings and requests with several methods: all their categories are charged."""

import pytest

# Which route serves /jobs/../login depends on the router: both categories are charged.
BOTH = "/jobs/../login"


def both(**login):
    jobs = {"limit": 3, "window": "1h", "endpoints": ["/jobs/*"]}
    return {"categories": {"jobs": jobs, "login": {"limit": 5, "window": "1h", "endpoints": ["/login"], **login}}}


def test_a_path_with_two_readings_is_charged_to_both(make_app):
    api = make_app(both())
    assert [api.request(path).remaining for path in (BOTH, "/jobs/1", "/login", BOTH)] == [2, 1, 3, 0]
    assert api.request(BOTH).status == 429
    assert api.request("/login").remaining == 1  # a denial by one category does not charge the other
    assert api.limiter.category_limiters["login"].allowed == 4


def test_shadow_mode_or_charges_by_status_of_one_reading_do_not_disable_the_other(make_app):
    shadow = make_app(both(mode="shadow", limit=1))
    assert shadow.statuses(4, BOTH) == [200, 200, 200, 429]
    failures = make_app(both(count=[401], limit=1))
    assert [failures.request(BOTH, headers=[("X-Status", "200")]).status for _ in range(4)] == [200, 200, 200, 429]
    assert [failures.request("/login", headers=[("X-Status", "401")]).status for _ in range(2)] == [401, 429]


def test_a_charge_by_status_of_one_reading_is_corrected(make_app):
    api = make_app(both(count=[401]))
    ok, failed = [("X-Status", "200")], [("X-Status", "401")]
    assert [api.request(BOTH, headers=headers).remaining for headers in (ok, failed)] == [2, 1]
    assert api.request("/login", headers=failed).remaining == 3


def test_slots_of_one_reading_are_released(make_app):
    api = make_app(both(algorithm="concurrency", limit=1))
    assert api.statuses(4, BOTH) == [200, 200, 200, 429]
    assert api.request("/login").status == 200


@pytest.mark.parametrize("header", ["X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"])
def test_method_override_headers_are_charged(make_app, header):
    items = {"limit": 2, "endpoints": [{"path": "/items", "methods": ["DELETE"]}]}
    api = make_app({"categories": {"remove": items}, "exempt_methods": ["OPTIONS"]})
    for method in ("POST", "OPTIONS"):
        assert api.request("/items", method, [(header, "delete")]).status == 200
    assert api.request("/items", "DELETE").status == 429
    assert api.request("/items", "POST", [(header, "DELETE")]).status == 429
    assert api.request("/items", "POST").status == 200
