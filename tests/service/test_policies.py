"""Which policy is selected for a key: overrides, roll-outs and descriptors, compared with simple oracles."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from tidegate import ResourceUnknown
from tidegate.service._config.settings import load_settings

WORDS = st.text(alphabet="ab:", min_size=1, max_size=4)
PATTERNS = st.text(alphabet="ab:*", min_size=1, max_size=4)


def make_policies(**sections):
    return load_settings(sections).policies


def limits(variant):
    return [str(limit) for limit in variant.policy.limits]


def test_exact_overrides_go_first_then_patterns_in_order():
    policies = make_policies(
        policies={
            "api": {
                "limits": "1/1m",
                "overrides": [
                    {"key": "partner:*", "limits": "2/1m"},
                    {"key": "partner:a", "limits": "3/1m"},
                    {"key": ["eu", "*"], "limits": "4/1m"},
                    {"key": "*:vip", "limits": "5/1m"},
                ],
            }
        }
    )
    found = {
        key: limits(policies.choose("api", key))[0]
        for key in ("x", "partner:b", "partner:a", ("eu", "x"), "eu/x", "partner:vip", "me:vip", ("eu", "x", "y"))
    }
    assert found == {
        "x": "1/1m",
        "partner:b": "2/1m",
        "partner:a": "3/1m",
        ("eu", "x"): "4/1m",
        "eu/x": "1/1m",
        "partner:vip": "2/1m",
        "me:vip": "5/1m",
        ("eu", "x", "y"): "1/1m",
    }


@given(st.lists(PATTERNS, unique=True, max_size=4), WORDS)
def test_overrides_match_as_globs_do(patterns, key):
    entries = [{"key": pattern, "limits": f"{number + 2}/1m"} for number, pattern in enumerate(patterns)]
    try:
        policies = make_policies(policies={"api": {"limits": "1/1m", "overrides": entries}})
    except ValueError as error:
        assert "is never reached" in str(error)  # noqa: PT017 - the only reason there is
        return
    exact = [number for number, pattern in enumerate(patterns) if pattern == key]
    wild = [number for number, pattern in enumerate(patterns) if fnmatchcase(key, pattern)]
    expected = ([*exact, *wild] or [-1])[0] + 2
    assert limits(policies.choose("api", key)) == [f"{expected}/1m"]


def test_a_rollout_enforces_its_percentage_and_keeps_selected_keys():
    keys = [f"user:{number}" for number in range(2000)]
    enforced = {}
    for percent in (0, 10, 50, 100):
        policies = make_policies(policies={"api": {"limits": "1/1m", "rollout": percent}})
        enforced[percent] = {key for key in keys if policies.choose("api", key).policy.mode == "enforce"}
        assert abs(len(enforced[percent]) / 20 - percent) < 5
    assert enforced[0] == set()
    assert enforced[10] < enforced[50] < enforced[100] == set(keys)


def test_the_error_for_an_unknown_policy_lists_known_policies():
    with pytest.raises(ResourceUnknown, match="there is no policy 'aa': did you mean 'a'"):
        make_policies(policies={"a": "1/1m"}).choose("aa", "x")
    with pytest.raises(ResourceUnknown, match="there is no policy 'b': known names are a"):
        make_policies(policies={"a": "1/1m"}).choose("b", "x")
    with pytest.raises(ResourceUnknown, match="none is configured"):
        make_policies().choose("b", "x")


# ---- descriptors -----------------------------------------------------------------------------------------------------

TREE = [
    {"key": "ip", "rate_limit": {"unit": "minute", "requests_per_unit": 1}},
    {"key": "ip", "value": "10.0.0.1", "rate_limit": {"unit": "minute", "requests_per_unit": 2}},
    {"key": "ip", "value": "10.*", "rate_limit": {"unit": "minute", "requests_per_unit": 3}},
    {"key": "ip", "value": "10.1*", "share_threshold": True, "rate_limit": {"unit": "hour", "requests_per_unit": 4}},
    {
        "key": "path",
        "value": "/a",
        "rate_limit": {"unit": "month", "requests_per_unit": 5},
        "descriptors": [{"key": "user", "shadow_mode": True, "limits": ["6/1s", "60/1m"]}],
    },
    {"key": "free", "rate_limit": {"unlimited": True}},
]


@cases(
    ("descriptor", "limit", "key"),
    [
        ([("ip", "1.2.3.4")], "1/1m fixed_window name=per-minute", ("e", "ip", "1.2.3.4")),
        ([("ip", "10.0.0.1")], "2/1m fixed_window name=per-minute", ("e", "ip", "10.0.0.1")),
        ([("ip", "10.0.0.2")], "3/1m fixed_window name=per-minute", ("e", "ip", "10.0.0.2")),
        ([("ip", "10.1.0.2")], "4/1h fixed_window name=per-hour", ("e", "ip", "10.1*")),
        ([("path", "/a")], "5/month calendar_window name=per-month", ("e", "path", "/a")),
        ([("path", "/a"), ("user", "bob")], "6/1s", ("e", "path", "/a", "user", "bob")),
        ([("path", "/b")], None, None),
        ([("path", "/a"), ("plan", "x")], None, None),
        ([("ip", "1.2.3.4"), ("user", "bob")], None, None),
        ([("free", "x")], None, None),
        ([], None, None),
    ],
)
def test_descriptors_match_nodes_of_the_tree(descriptor, limit, key):
    found = make_policies(domains=[{"domain": "e", "descriptors": TREE}]).match_descriptor("e", descriptor)
    if limit is None:
        assert found is None
        return
    variant, counted = found
    assert (limits(variant)[0], counted) == (limit, key)
    assert variant.policy.mode == ("shadow" if ("user", "bob") in descriptor else "enforce")


def test_every_variant_has_a_unique_slot():
    policies = make_policies(
        policies={"a": {"limits": "1/1m", "overrides": [{"key": "x*", "limits": "2/1m"}]}, "b": "1/1m"},
        domains=[
            {"domain": "a", "descriptors": TREE[:-1]},
            {
                "domain": "b",
                "descriptors": [{"key": "a_b", "limits": "1/1s"}, {"key": "a", "value": "b", "limits": "2/1s"}],
            },
        ],
    )
    assert len(list(policies.variants())) == len(policies.slots) == 6 + 6 + 2
