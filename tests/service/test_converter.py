"""Conversion of files of Envoy's own rate limit service, compared with an oracle of how that service reads them."""

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import cases
from tests.service.test_envoy import EnvoyClient, run
from tidegate import ConfigError
from tidegate.service._config.envoy_files import convert
from tidegate.service._config.schema import schema
from tidegate.service._config.settings import load_settings
from tidegate.service._decisions.decider import Decider
from tidegate.service._decisions.descriptors import UNIT_PERIODS
from tidegate.service._envoy.messages import CODE_OK, CODE_OVER_LIMIT
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

ENVOY_FILES = Path(__file__).parent / "envoy_files"
GOOD = sorted(path.name for path in ENVOY_FILES.glob("*.yaml"))
REMARKS = {
    "modes.yaml": [
        "5: descriptors[0].detailed_metric: ignored: metrics of tidegate have one label per limit, and never values",
        "10: descriptors[1].value_to_metric: ignored: metrics of tidegate have one label per limit, and never values",
        "11: descriptors[1].rate_limit.unit: is a calendar month in tidegate, 30 days in Envoy's service",
        "12: descriptors[2]: has no limit (Envoy uses such a descriptor only to name metrics): converted to unlimited",
    ],
}


def converted_policies(*names):
    text, _ = convert([ENVOY_FILES / name for name in names])
    return load_settings(yaml.safe_load(text)).policies


def limits_of(policies):
    domain = policies.domains["shop"]
    return {variant.policy.name: str(variant.policy.limits[0]) for variant in domain.variants()}


# ---- files -----------------------------------------------------------------------------------------------------------


@cases("name", GOOD)
def test_remarks_name_file_line_and_field(name):
    path = ENVOY_FILES / name
    _, remarks = convert([path])
    assert remarks == [f"{path}:{remark}" for remark in REMARKS.get(name, [])]


@cases("name", sorted(path.name for path in (ENVOY_FILES / "refused").iterdir()))
def test_unsupported_settings_are_refused(name):
    path = ENVOY_FILES / "refused" / name
    message = path.read_text(encoding="utf-8").rpartition("# refused: ")[2].strip()
    with pytest.raises(ConfigError) as error:
        convert([path])
    assert str(error.value) == f"{path}:{message.replace('FILE', str(path))}"


@pytest.mark.parametrize("name", GOOD)
def test_a_converted_file_is_valid(name, tmp_path):
    text, _ = convert([ENVOY_FILES / name])
    (tmp_path / "service.yaml").write_text(text, encoding="utf-8")
    assert list(load_settings(tmp_path / "service.yaml").policies.domains) == ["shop"]


def test_all_limits_are_converted():
    assert limits_of(converted_policies("plain.yaml")) == {"shop/api_key": "100/1m fixed_window name=per-minute"}
    assert limits_of(converted_policies("nested.yaml")) == {
        "shop/country/method=POST": "10/1s fixed_window name=per-second",
        "shop/country/method": "50/1s fixed_window name=per-second",
        "shop/country=aq": "3/1d fixed_window name=per-day",
    }
    assert limits_of(converted_policies("several_units.yaml")) == {
        "shop/user": "10/5m fixed_window",
        "shop/team": "10/1h fixed_window name=teams",
        "shop/guest": "10/3d fixed_window name=guests",
    }
    policies = converted_policies("wildcards.yaml")
    for path, quota in (("/admin/users/7", 5), ("/admin/x", 20), ("/admi", 600), ("/health", None)):
        found = policies.match_descriptor("shop", [("path", path)])
        assert (None if found is None else found[0].policy.limits[0].quota) == quota
    keys = {policies.match_descriptor("shop", [("path", path)])[1] for path in ("/admin/x", "/admin/y")}
    assert keys == {("shop", "path", "/admin/*")}  # one threshold for both
    modes = {
        variant.policy.name: variant.policy.mode
        for variant in converted_policies("modes.yaml").domains["shop"].variants()
    }
    assert modes == {"shop/user": "shadow", "shop/team": "enforce"}
    policies = converted_policies("numbers_and_flags.yaml")
    for number, pair in enumerate((("status", "404"), ("cached", "true"), ("version", "1.0"), ("off", "no")), start=1):
        assert policies.match_descriptor("shop", [pair])[0].policy.limits[0].quota == number


def test_files_of_one_domain_are_merged(tmp_path):
    first, second = ENVOY_FILES / "plain.yaml", ENVOY_FILES / "another_part.yaml"
    text, remarks = convert([first, second])
    assert remarks == [f"{second}:1: domain: shop is in several files: its descriptors are merged"]
    assert [each["key"] for each in yaml.safe_load(text)["domains"][0]["descriptors"]] == ["api_key", "basket"]
    with pytest.raises(ConfigError) as error:
        convert([first, second, second])
    assert (
        str(error.value) == f"{second}:3: descriptors[0]: duplicate descriptor for basket, first defined in {second}:3"
    )
    other = tmp_path / "other.yaml"
    other.write_text("domain: other\n", encoding="utf-8")
    assert [each["domain"] for each in yaml.safe_load(convert([other, first])[0])["domains"]] == ["other", "shop"]


async def test_a_limit_replaces_others_of_the_same_request():
    clock = ManualClock(start=1_728_000_000)
    decider = Decider(converted_policies("replaces.yaml"), MemoryStore(clock=clock))
    async for envoy in run(decider):
        client, partner, staff = (({name: "x"},) for name in ("client", "partner", "staff"))
        for _ in range(4):
            assert await envoy.codes(client, partner, domain="shop") == (CODE_OK, [CODE_OK, CODE_OK])
        assert await envoy.codes(client, partner, domain="shop") == (CODE_OVER_LIMIT, [CODE_OK, CODE_OVER_LIMIT])
        for _ in range(3):
            assert await envoy.codes(client, partner, staff, domain="shop") == (CODE_OK, [CODE_OK] * 3)
        # What was replaced has not been charged.
        assert [await codes(envoy, client) for _ in range(3)] == [CODE_OK, CODE_OK, CODE_OVER_LIMIT]


async def codes(envoy: EnvoyClient, descriptor):
    return (await envoy.codes(descriptor, domain="shop"))[0]


def test_the_schema_has_replaces():
    descriptor = schema()["$defs"]["descriptor"]["properties"]
    assert "replaces" in descriptor["rate_limit"]["properties"]


# ---- the oracle ------------------------------------------------------------------------------------------------------

VALUES = ("", "a", "ab", "a*", "ab*", "*")


def nodes(depth):
    limit = st.builds(
        lambda unit, quota: {"unit": unit, "requests_per_unit": quota},
        st.sampled_from(sorted(UNIT_PERIODS)),
        st.integers(1, 9),
    )
    below = trees(depth - 1) if depth else st.just([])
    parts = {"key": st.sampled_from("kl"), "value": st.sampled_from(VALUES), "descriptors": below}
    return st.fixed_dictionaries(parts, optional={"rate_limit": limit | st.just({"unlimited": True})})


def trees(depth):
    return st.lists(nodes(depth), max_size=4, unique_by=lambda node: (node["key"], node["value"]))


def expected(tree, descriptor):
    """Find the limit as Envoy's service does: by value, else by the first wildcard of the file, else by the key."""
    limit = None
    for key, value in descriptor:
        ours = [node for node in tree if node["key"] == key]
        wild = [node for node in ours if node["value"].endswith("*") and value.startswith(node["value"][:-1])]
        exact = [node for node in ours if node["value"] == value != ""]
        found = next(iter(exact + wild + [node for node in ours if not node["value"]]), None)
        if found is None:
            return None
        limit, tree = found.get("rate_limit"), found["descriptors"]
    return (
        None if limit is None or limit.get("unlimited") else (limit["requests_per_unit"], UNIT_PERIODS[limit["unit"]])
    )


@given(
    trees(2),
    st.lists(st.tuples(st.sampled_from("kl"), st.sampled_from(("a", "ab", "abc", "b"))), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_a_converted_tree_has_the_same_limits(tmp_path_factory, tree, descriptor):
    path = tmp_path_factory.getbasetemp() / "oracle.yaml"
    path.write_text(yaml.safe_dump({"domain": "shop", "descriptors": tree}), encoding="utf-8")
    try:
        text, _ = convert([path])
    except ConfigError as error:
        assert "is never reached" in str(error)  # noqa: PT017 - the only reason that there may be
        return
    found = load_settings(yaml.safe_load(text)).policies.match_descriptor("shop", descriptor)
    limit = None if found is None else found[0].policy.limits[0]
    assert (None if limit is None else (limit.quota, limit.period)) == expected(tree, descriptor)
