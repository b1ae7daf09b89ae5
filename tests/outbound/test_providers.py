"""Providers from files: which are refused, and how a changed file is reloaded."""

import asyncio
import logging
import sys
import time

import pytest

from tidegate import ConfigError, Denied, ResourceUnknown
from tidegate.outbound import AsyncGate, Gate, OutboundRequest, Providers
from tidegate.service._runtime.components import watch_files
from tidegate.testing import ManualClock

SENT = "key: {header: X-Api-Key}\n"


def write(folder, name, domain="a.test", limit=5, more=""):
    path = folder / name
    path.write_text(f"domain: {domain}\nlimit: {limit}\nperiod: 1m\n{more}")
    path.chmod(0o600)
    return path


def call(url):
    return OutboundRequest("GET", url, {}.get, lambda: None, True, lambda _error: False)


def test_files_and_directories_can_be_combined(tmp_path):
    folder = tmp_path / "providers"
    folder.mkdir()
    write(folder, "b.yml", "b.test")
    write(folder, "a.yaml", "a.test")
    write(folder, ".hidden.yaml", "hidden.test")
    write(folder, "notes.txt", "notes.test")
    special = write(tmp_path, "special.yaml", "special.test")
    known = Providers.load(files=[str(special)], directories=[folder])
    assert [each.domain for each in known] == ["special.test", "a.test", "b.test"]
    assert len(known) == 3
    assert repr(known) == "<Providers special, a, b>"


def test_two_files_for_one_domain_are_refused_with_both_names(tmp_path):
    first, second = write(tmp_path, "one.yaml", "A.test"), write(tmp_path, "two.yaml", "a.test.")
    with pytest.raises(ConfigError) as error:
        Providers.load(files=[first], directories=[tmp_path])
    assert str(first) in str(error.value)
    assert "two providers have the domain 'a.test'" in str(error.value)
    with pytest.raises(ConfigError) as error:
        Providers.load(files=[first, second])
    assert str(error.value).startswith(f"{second} and {first}: ")


def test_two_files_of_one_name_are_refused_with_both_names(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    first, second = write(tmp_path, "fmp.yaml", "a.test"), write(other, "fmp.yaml", "b.test")
    with pytest.raises(ConfigError) as error:
        Providers.load(files=[first], directories=[other])
    assert str(error.value).startswith(f"{second} and {first}: two providers have the name 'fmp'")


def test_one_path_instead_of_a_list_is_refused():
    with pytest.raises(ConfigError, match=r"files: must be a list of paths such as \['fmp.yaml'\], not one path"):
        Providers.load("fmp.yaml")


def test_a_missing_file_or_directory_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        Providers.load(files=[tmp_path / "nowhere.yaml"])
    with pytest.raises(ConfigError, match=r"nowhere: cannot be listed: No such file"):
        Providers.load(directories=[tmp_path / "nowhere"])


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_key_that_others_can_read_is_warned_about_or_refused(tmp_path, caplog, mode):
    path = write(tmp_path, "a.yaml", more=f"api_key: hunter2\n{SENT}")
    path.chmod(mode)
    Providers.load(files=[path])
    assert f"can be read by others (mode {mode:03o}): chmod 600 {path}" in caplog.text
    with pytest.raises(ConfigError, match="chmod 600"):
        Providers.load(files=[path], permissions="refuse")
    caplog.clear()
    Providers.load(files=[path], permissions="ignore")
    assert not caplog.text


def test_a_private_file_or_one_without_a_key_is_accepted(tmp_path, caplog):
    open_one, own = write(tmp_path, "a.yaml"), write(tmp_path, "b.yaml", "b.test", more=f"api_key: hunter2\n{SENT}")
    open_one.chmod(0o644)
    Providers.load(files=[open_one, own], permissions="refuse")
    assert not caplog.text
    with pytest.raises(ConfigError, match="permissions: must be warn, refuse or ignore"):
        Providers.load(permissions="no")


def test_a_changed_file_is_loaded(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    path = write(tmp_path, "a.yaml", more=f"api_key: old-key\n{SENT}")
    known = Providers.load(directories=[tmp_path])
    assert known.reload() == ()
    write(tmp_path, "a.yaml", more=f"api_key: new-key-\n{SENT}")
    assert known.reload() == ("a.test",)
    assert known.match("https://a.test").api_key.reveal() == "new-key-"
    write(tmp_path, "b.yaml", "b.test")
    assert known.reload() == ("b.test",)
    path.unlink()
    assert known.reload() == ("a.test",)
    assert known.match("https://a.test") is None
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["provider a.test was removed: its limits do not apply any more"]
    assert "key" not in caplog.text


def test_an_invalid_file_leaves_the_previous_version_in_force(tmp_path, caplog):
    path = write(tmp_path, "a.yaml", limit=5)
    known = Providers.load(directories=[tmp_path])
    path.write_text("domain: a.test\nlimit: none\nperiod: 1m\n")
    assert known.reload() == ()
    assert known.match("https://a.test").limits[0].quota == 5
    assert known.problems == (f"{path}:2: limit: expected an integer of at least 1, not 'none'",)
    assert "the previous version stays in effect" in caplog.text
    caplog.clear()
    known.reload()
    assert not caplog.text  # said once for each state of the file
    write(tmp_path, "a.yaml", limit=77)
    assert known.reload() == ("a.test",)
    assert known.match("https://a.test").limits[0].quota == 77
    assert known.problems == ()


def test_a_later_conflict_leaves_the_previous_version_in_force(tmp_path):
    write(tmp_path, "a.yaml", limit=5)
    known = Providers.load(directories=[tmp_path])
    write(tmp_path, "b.yaml", limit=9)
    known.reload()
    assert [(each.name, each.limits[0].quota) for each in known] == [("a", 5)]
    assert "b.yaml and" in known.problems[0]


def test_an_edit_of_one_file_never_removes_the_provider_of_another(tmp_path, caplog):
    write(tmp_path, "a.yaml", "a.test")
    write(tmp_path, "b.yaml", "b.test")
    known = Providers.load(directories=[tmp_path])
    write(tmp_path, "a.yaml", "b.test", limit=9)
    for _ in range(2):
        assert known.reload() == ()
        assert [(each.domain, each.limits[0].quota) for each in known] == [("a.test", 5), ("b.test", 5)]
        assert "two providers have the domain 'b.test'" in known.problems[0]
    assert caplog.text.count("the previous version stays in effect") == 1


# ---- ceilings that several files share -------------------------------------------------------------------------------


def write_ceiling(folder, name, spend, currency="usd"):
    price = f"price: {{date: 2026-11-01, currency: {currency}, models: {{m: {{input: 1, output: 5}}}}}}\n"
    return write(folder, f"{name}.yaml", f"{name}.test", more=f"profile: openai\n{price}spend: [{spend}]\n")


@pytest.mark.parametrize(
    ("spend", "currency", "limit"),
    [
        ("2/day unit=usd name=all", "usd", "2000000/day calendar_window unit=usd_micros name=all"),
        ("1/day unit=eur name=all", "eur", "1000000/day calendar_window unit=eur_micros name=all"),
        ("1/1d unit=usd name=all", "usd", "1000000/1d sliding_log unit=usd_micros name=all"),
        (
            "{limit: 1, period: day, unit: usd, name: all, per: team}",
            "usd",
            "1000000/day calendar_window unit=usd_micros name=all per team",
        ),
    ],
    ids=["limit", "currency", "period", "scope"],
)
def test_a_ceiling_that_differs_between_files_is_refused(tmp_path, spend, currency, limit):
    one = write_ceiling(tmp_path, "a", "1/day unit=usd name=all")
    other = write_ceiling(tmp_path, "b", spend, currency)
    with pytest.raises(ConfigError) as error:
        Providers.load(directories=[tmp_path])
    assert str(error.value) == (
        f"{other} and {one}: the ceiling 'all' has the limits '{limit}' and '1000000/day calendar_window "
        "unit=usd_micros name=all': set the same limit in both, or another name in one of them"
    )


def test_a_shared_ceiling_changes_when_all_its_files_have_changed(tmp_path, caplog):
    def quotas():
        return [each.ceilings[0].limit.quota // 10**6 for each in known]

    for name in "abc":
        write_ceiling(tmp_path, name, "1/day unit=usd name=all")
    known = Providers.load(directories=[tmp_path])
    write_ceiling(tmp_path, "a", "22/day unit=usd name=all")
    assert known.reload() == ()
    assert quotas() == [1, 1, 1]
    assert "the ceiling 'all' has the limits" in known.problems[0]
    assert "a.yaml: the previous version stays in effect" in caplog.text
    write_ceiling(tmp_path, "b", "333/day unit=usd name=all")
    write_ceiling(tmp_path, "c", "4444/day unit=usd name=all")
    assert known.reload() == ()
    assert quotas() == [1, 1, 1]
    for name in "bc":
        write_ceiling(tmp_path, name, "22/day unit=usd name=all")
    assert known.reload() == ("a.test", "b.test", "c.test")
    assert (quotas(), known.problems) == ([22, 22, 22], ())


def test_a_new_file_whose_ceiling_differs_is_ignored(tmp_path):
    write_ceiling(tmp_path, "b", "1/day unit=usd name=all")
    known = Providers.load(directories=[tmp_path])
    write_ceiling(tmp_path, "a", "2/day unit=usd name=all")
    assert known.reload() == ()
    assert [each.domain for each in known] == ["b.test"]
    assert "the ceiling 'all'" in known.problems[0]


def test_a_directory_missing_for_a_moment_keeps_its_providers(tmp_path):
    folder = tmp_path / "providers"
    folder.mkdir()
    write(folder, "a.yaml")
    known = Providers.load(directories=[folder])
    folder.rename(tmp_path / "elsewhere")
    known.reload()
    assert "cannot be listed" in known.problems[0]
    (tmp_path / "elsewhere").rename(folder)
    known.reload()
    assert known.problems == ()
    assert len(known) == 1


def test_a_running_gate_reloads_files_and_keeps_usage(tmp_path):
    """A changed limit, or a rotated key, gives nothing back."""
    write(tmp_path, "a.yaml", limit=5, more="api_key: old\n")
    clock = ManualClock(1_728_000_000)
    gate = Gate(Providers.load(directories=[tmp_path]), clock=clock, timeout=0, reload=5)
    for _ in range(3):
        gate.run(gate.send_flow(call("https://a.test/"), lambda _provider: _reply()))
    write(tmp_path, "a.yaml", limit=4, more="api_key: newer\n")
    clock.advance(5)
    gate.run(gate.send_flow(call("https://a.test/"), lambda _provider: _reply()))
    with pytest.raises(Denied, match=r"provider a: 'a\.test' got no permit"):
        gate.run(gate.send_flow(call("https://a.test/"), lambda _provider: _reply()))
    gate.close()


def _reply():
    from tidegate.outbound._quota.exchange import ProviderResponse  # noqa: PLC0415 - not public

    return ProviderResponse(200, (), lambda: None, "answer")


@pytest.mark.parametrize("target", ["n7", "d7.example", "API.d7.example", "free.example"])
def test_finding_a_provider_takes_as_long_with_many_providers(target):
    def quickest(count):
        known = Providers.of(
            *({"domain": f"d{i}.example", "name": f"n{i}", "limit": 1, "period": "1m"} for i in range(count))
        )
        times = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(20):
                known.find(target)
            times.append(time.perf_counter() - began)
        return min(times)

    assert quickest(1000) < 10 * quickest(10)


def test_a_name_is_found_again_after_a_reload(tmp_path):
    file = write(tmp_path, "a.yaml", "a.test")
    known = Providers.load(directories=[tmp_path])
    assert (known.find("a").domain, known.find("b.test")) == ("a.test", None)
    file.unlink()
    write(tmp_path, "b.yaml", "b.test")
    known.reload()
    assert (known.find("b").domain, known.find("b.test").name) == ("b.test", "b")
    with pytest.raises(ResourceUnknown):
        known.find("a")


def many(count):
    return Providers.of(*({"domain": f"d{i}.example", "name": f"n{i}", "limits": "5/1m"} for i in range(count)))


def calls_of(function):
    """Count the calls of functions in the second of two runs; no other load changes that number."""
    count = 0

    def observe(_frame, event, _argument):
        nonlocal count
        count += event in ("call", "c_call")

    function()
    sys.setprofile(observe)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_an_unknown_name_is_compared_with_all_names_only_once():
    known = many(2000)

    def find():
        with pytest.raises(ResourceUnknown, match="there is no provider 'n99999x': did you mean"):
            known.find("n99999x")

    assert calls_of(find) < 500


def test_the_message_for_an_unknown_name_lists_a_bounded_number_of_names():
    with pytest.raises(ResourceUnknown) as error:
        many(1000).find("zzzzzzzzzzzz")
    assert str(error.value).endswith("known providers are " + ", ".join(f"n{i}" for i in range(20)) + ", …")


def test_the_message_for_an_unknown_name_follows_a_reload(tmp_path):
    write(tmp_path, "alpha.yaml", "a.test")
    known = Providers.load(directories=[tmp_path])
    with pytest.raises(ResourceUnknown, match="known providers are alpha"):
        known.find("gamme")
    write(tmp_path, "gamma.yaml", "b.test")
    known.reload()
    with pytest.raises(ResourceUnknown, match="did you mean 'gamma'"):
        known.find("gamme")


def test_a_directory_without_provider_files_is_reported(tmp_path, caplog):
    write(tmp_path, "a.txt")
    Providers.load(directories=[tmp_path])
    assert caplog.messages == [f"{tmp_path} contains no provider file: their names end in .yaml or .yml"]
    caplog.clear()
    write(tmp_path, "a.yaml")
    Providers.load(directories=[tmp_path])
    assert not caplog.messages


async def test_a_service_without_calls_reports_a_bad_file_when_it_appears(tmp_path, caplog):
    write(tmp_path, "a.yaml")
    clock = ManualClock(1_728_000_000)
    gate = AsyncGate(Providers.load(directories=[tmp_path]), clock=clock, reload=None)
    watching = asyncio.create_task(watch_files(gate))
    await asyncio.sleep(0)
    write(tmp_path, "b.yaml", "b.test", limit="many")
    write(tmp_path, "c.yaml", "c.test")
    clock.advance(5)
    for _ in range(1000):
        if gate.providers.problems:
            break
        await asyncio.sleep(0.005)
    assert "a provider file is invalid, it is ignored" in caplog.text
    assert {provider.name for provider in gate.providers} == {"a", "c"}
    watching.cancel()
    await gate.close()
