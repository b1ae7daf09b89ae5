"""The categories of a request, and that another spelling of a path does not avoid a category."""

import re
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tests.inbound.harness import matches
from tidegate import ConfigError, Limit, Policy
from tidegate.inbound._rules.config import load_rules
from tidegate.inbound._rules.model import Category, Endpoint, Rules
from tidegate.inbound._rules.path_readings import readings
from tidegate.inbound._rules.paths import PathTree, canonical

DEFAULTS = load_rules()


def category(path, method="GET", rules=DEFAULTS, template=None):
    """Return the strictest category that a request is charged to; None if it is not limited."""
    found = matches(rules, path, method, template)
    return min(found, key=lambda match: strictness(match.category)).category.name if found else None


def strictness(category):
    return min(limit.quota / limit.length for limit in category.policy.limits)


def rules_of(**endpoints):
    """Build rules whose categories become less strict in order, without a category for other paths."""
    categories = [
        Category(
            name, Policy(name, (Limit(i, "1h"),)), tuple(e if isinstance(e, Endpoint) else Endpoint(e) for e in some)
        )
        for i, (name, some) in enumerate(endpoints.items(), 1)
        if name != "exempt"
    ]
    return Rules(tuple(categories), exempt=tuple(map(Endpoint, endpoints.get("exempt", ()))))


# ---- the spec --------------------------------------------------------------------------------------------------------


@cases(
    ("path", "name"),
    [
        ("/api/cluster", "expensive"),
        ("/api/recluster", "expensive"),
        ("/api/refresh", "moderately"),
        ("/api/clear-cache", "moderately"),
        ("/api/feeds", "read"),
        ("/api/clusters", "read"),
        ("/api/timeline", "read"),
        ("/api/timeline/today", "read"),
        ("/api/timeline/2026/05", "read"),
        ("/api/status", "read"),
        ("/api/feed/7", "read"),
        ("/api/cleanup-orphaned", "very_expensive"),
        ("/api/admin/rate-limit-stats", None),
        ("/wp-login.php", "read"),  # probes are limited too
        ("/", "read"),
    ],
)
def test_the_endpoints_of_the_spec(path, name):
    for method in ("GET", "POST", "HEAD", "OPTIONS", "BREW"):
        assert category(path, method) == name


# ---- other spellings -------------------------------------------------------------------------------------------------

SPELLINGS = [
    "/api//cluster", "//api/cluster", "/API/cluster", "/Api/Cluster", "/api/cluster/", "/api/cluster//",
    "/api/./cluster", "/api/cluster/.", "/api/x/../cluster", "/../api/cluster", "/api/%2e/cluster",
    "/api/%2E%2e/api/cluster", "/api/%252e/cluster", "/api%2fcluster", "/api%252Fcluster", "/%61pi/cluster",
    "/api/cluster;x=1", "/api;v=2/cluster", "/api/cluster;", "/api/feeds/..;/cluster", "/api/feeds/;/../cluster",
    "\\api\\cluster", "/api/cluster%00", "/api/cluster\0", "/api/cluster%20", "/api/cluster\n", "/api/cluster?x",
    "/api/cluster%3Fx=1", "/api/cluster#x", "api/cluster", "/api/cluster/x/..", "/api/cluster/x//../..",
    "/api/timeline/../cluster", "/api/feed/%2e%2e/cluster",
]  # fmt: skip


@cases("path", SPELLINGS)
def test_other_spellings_of_a_path_have_its_category(path):
    assert category(path) == "expensive"


@pytest.mark.parametrize(
    "path", ["/api/clusterx", "/api/cluster.json", "/api/cluster/x", "/x/api/cluster", "/api/clu/ster"]
)
def test_different_paths_have_other_categories(path):
    assert category(path) == "read"


def test_routers_that_compare_paths_literally_are_covered():
    """`/jobs/*` matches all subpaths, dots included; they cannot be charged to a cheaper category only."""
    rules = rules_of(expensive=["/jobs/*"], cheap=["/feeds"], exempt=["/health"])
    for path in ("/jobs/../feeds", "/jobs/%2e%2e/feeds", "/jobs/..;/feeds", "/jobs/../health", "/jobs//../health"):
        assert category(path, rules=rules) == "expensive"


def test_a_path_is_exempt_only_if_all_its_readings_are():
    rules = rules_of(all=["/*"], exempt=["/health", "/static/*"])
    assert category("/health", rules=rules) is None
    for path in ("/HEALTH", "/health/", "//health"):  # routers may have other routes for these
        assert category(path, rules=rules) == "all"
    assert category("/static/a/b.css", rules=rules) is None
    assert category("/static/.hidden", rules=rules) is None
    for path in (
        "/api/../health",
        "/static/../api",
        "/static/%2e%2e/api",
        "/static/..;/api",
        "/health;/../api",
        "/x;/health",
    ):
        assert category(path, rules=rules) == "all"


@st.composite
def disguised(draw, path):
    """Write a path in a form that some router may read as the same path."""
    segments = path.split("/")[1:]
    out = ""
    for segment in segments:
        out += draw(st.sampled_from(["/", "//", "/./", "/x/../", "/;a=b/", "/%2e/", "\\", "%2f"]))
        for character in segment:
            out += draw(
                st.sampled_from(
                    [character, character.upper(), f"%{ord(character):02x}", quote(f"%{ord(character):02X}")]
                )
            )
        out += draw(st.sampled_from(["", ";", ";x=y", "%00", "%3bv=1"]))
    return out + draw(st.sampled_from(["", "/", "/.", "//", "?q", "%23f", "/y/.."]))


@given(disguised("/api/cleanup-orphaned"))
def test_random_spellings_of_a_path_have_its_category(path):
    assert category(path) == "very_expensive"


@given(st.text(), st.text(max_size=10), st.one_of(st.none(), st.text()))
def test_matching_never_raises(path, method, template):
    matches(DEFAULTS, path, method, template)


@pytest.mark.parametrize(
    "path", ["/" * 65_536, "/../" * 16_000, "/%25" * 16_000, "/a;" * 20_000, "%" * 65_536, "/" + "a/" * 30_000]
)
def test_very_long_paths_are_matched(path):
    assert category(path) == "read"


@given(st.lists(st.sampled_from(["a", "b", "..", ".", "", "%2e", "A", ";x"]), max_size=6).map("/".join))
def test_readings_are_normalized_and_bounded(path):
    found = readings(path)
    assert 1 <= len(found) <= 5
    assert len(set(found)) == len(found)
    for reading in found:
        assert reading.startswith("/")
        assert "//" not in reading
        assert reading == "/" or not reading.endswith("/")


def test_a_clean_path_has_one_reading():
    assert readings("/api/v1/items/42") == ("/api/v1/items/42",)
    assert readings("/") == ("/",)


# ---- endpoints -------------------------------------------------------------------------------------------------------


def test_the_most_specific_endpoint_wins_whatever_the_order():
    paths = ["/*", "/a/*", "/a/{x}/c", "/a/b/*", "/a/b/c", "/a/{x}/{y}"]
    for some in (paths, paths[::-1]):
        rules = rules_of(**{f"p{i}": [path] for i, path in enumerate(some)})
        found = [
            some[int(category(path, rules=rules)[1:])]
            for path in ("/a/b/c", "/a/b/d", "/a/x/c", "/a/x/d", "/a", "/a/x/c/d", "/")
        ]
        assert found == ["/a/b/c", "/a/b/*", "/a/{x}/c", "/a/{x}/{y}", "/a/*", "/a/*", "/*"]


def test_a_trailing_star_matches_the_path_itself_and_all_subpaths():
    rules = rules_of(some=["/api/feed/*"])
    for path in ("/api/feed/1", "/api/feed/1/2/3", "/api/feed/", "/api/feed"):
        assert category(path, rules=rules) == "some"
    for path in ("/api/feeds", "/api", "/api/feedx/1"):
        assert category(path, rules=rules) is None


def test_endpoints_with_methods():
    rules = rules_of(
        write=[Endpoint("/items/{id}", ("POST", "PUT"))],
        read=[Endpoint("/items/{id}", ("GET",))],
        probe=[Endpoint("/items/7", ("DELETE",))],
        rest=["/items/*"],
    )
    assert [category("/items/1", method, rules) for method in ("POST", "put", "GET", "HEAD", "DELETE")] == [
        "write", "write", "read", "read", "rest",
    ]  # fmt: skip
    assert [category("/items/7", method, rules) for method in ("DELETE", "GET", "PATCH")] == ["probe", "read", "rest"]
    assert category("/items/1", "HEAD", rules_of(a=[Endpoint("/items/1", ("HEAD",))], b=["/items/*"])) == "a"


def test_endpoints_with_costs():
    rules = rules_of(some=[Endpoint("/a", (), 5), Endpoint("/b", ("POST",), {"tokens": 7}), "/b"])
    assert [match.cost for match in matches(rules, "/a")] == [5]
    assert [match.cost for match in matches(rules, "/b", "POST")] == [{"tokens": 7}]
    assert [match.cost for match in matches(rules, "/b")] == [1]


def test_the_larger_cost_of_several_readings_is_charged():
    rules = rules_of(some=[Endpoint("/a", (), 5), Endpoint("/b/*", (), 2)])
    assert [match.cost for match in matches(rules, "/b/../a")] == [5]


@pytest.mark.parametrize(
    "template", ["/items/{item_id}", "/items/{item_id:int}", "/items/<item_id>", "/items/<int:item_id>"]
)
def test_a_route_template_of_the_framework_matches_its_endpoint(template):
    rules = rules_of(one=["/items/{id}"], all=["/*"], special=["/items/special"])
    assert category("/v2/mounted/5", rules=rules, template=template) == "one"
    assert category("/items/special", rules=rules, template=template) == "special"
    assert category("/elsewhere", rules=rules, template="/unknown/{x}") == "all"
    assert category("/V2/Mounted/../5", rules=rules, template=template) == "one"
    assert category("/elsewhere", rules=rules, template="no path") == "all"


@pytest.mark.parametrize("subpaths", ["/files/*", "/files/{path:path}", "/files/<path:name>"])
def test_route_templates_for_all_subpaths(subpaths):
    rules = rules_of(files=[subpaths])
    assert category("/files/a/b", rules=rules) == "files"
    assert category("/x", rules=rules, template="/files/{rest:path}") == "files"


@cases(
    ("endpoint", "message"),
    [
        ("api", "a path must start with '/', as in '/api'"),
        ("/a/*/b/**", "'**' in '/a/*/b/**' is not a valid path segment: use a literal, '*' or '{name}'"),
        ("/a*", "'a*' in '/a*' is not a valid path segment"),
        ("/a/{x:path}/b", "a wildcard for all subpaths must be at the end, as in '/api/*'"),
        ("/a?b=1", "'a?b=1' in '/a?b=1' is not a valid path segment"),
        ("/a/../b", "'..' in '/a/../b' is not a valid path segment"),
        ("/a/{x", "'{x' in '/a/{x' is not a valid path segment"),
        ("/a b", "'a b' in '/a b' is not a valid path segment"),
        ("GET /a", "a path must start with '/'"),
    ],
)
def test_invalid_endpoints_are_rejected(endpoint, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        canonical(endpoint)


def test_endpoints_are_normalized():
    assert canonical("/API//Cluster/") == "/api/cluster"
    assert canonical("/a%20b".replace("%20", "-")) == "/a-b"
    assert canonical("/") == "/"
    assert canonical("/*") == "/{*}"
    assert canonical("/a/*/b") == "/a/{}/b"


def test_an_endpoint_in_two_categories_is_rejected():
    with pytest.raises(ConfigError, match="endpoints: /A/ is already an endpoint of category 'one'"):
        rules_of(one=["/a"], two=["/A/"])
    with pytest.raises(ConfigError, match="/a/<y> is already an endpoint of category 'one'"):
        rules_of(one=["/a/{x}"], two=["/a/<y>"])
    with pytest.raises(ConfigError, match="/a is already exempt"):
        rules_of(one=["/a"], exempt=["/a"])


def test_a_request_path_is_never_read_as_a_template():
    tree: PathTree[str] = PathTree()
    tree.add("/a/{x}", (), "one")
    assert tree.find("/a/{}", "GET") == "one"
    assert tree.find("/{}/{}", "GET") is None
    assert not matches(rules_of(one=["/a/{x}/b"]), "/a/{*}")


def test_disabled_rules_match_nothing():
    assert not matches(Rules(DEFAULTS.categories, enabled=False), "/api/cluster")


def test_exempt_methods_match_nothing():
    rules = Rules(DEFAULTS.categories, exempt_methods=frozenset({"OPTIONS"}))
    assert not matches(rules, "/api/cluster", "OPTIONS")
    assert not matches(rules, "/api/cluster", "options")
    assert category("/api/cluster", "GET", rules) == "expensive"
