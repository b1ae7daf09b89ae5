"""Files of sources that appear, change and disappear while a service runs; in virtual time."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from tidegate import ConfigError
from tidegate.outbound import Providers
from tidegate.outbound.sources import SourceRunner
from tidegate.outbound.sources._configured import ConfiguredSources
from tidegate.outbound.sources._control import ControlServer, send_command
from tidegate.service._runtime.components import watch_files
from tidegate.stores import MemoryStore
from tidegate.testing import ManualClock

START = 1_728_000_000
FMP = {"domain": "fmp.test", "limit": 300, "period": "1m"}


def write(folder, file, name, interval="1h", path="x"):
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(f"name: {name}\nurl: https://fmp.test/{path}\ninterval: {interval}\n")
    return folder / file


class WatchedService:
    """A service that watches the folder `sources`, and the host it fetches from."""

    def __init__(self, folder):
        self.files = ConfiguredSources([], [folder / "sources"], folder / "data")
        self.clock = ManualClock(START)
        self.fetched = []
        self.runner = SourceRunner(
            Providers.of(FMP),
            self.files.load(),
            data=folder / "data",
            store=MemoryStore(clock=self.clock),
            transport=httpx.MockTransport(self._respond),
        )
        self.release = asyncio.Event()
        self.release.set()

    async def _respond(self, request):
        self.fetched.append(request.url.path)
        await self.release.wait()
        return httpx.Response(200, text="body")

    async def check(self):
        """Let the watcher check the files once."""
        watching = asyncio.create_task(watch_files(self.runner.gate, self.runner, self.files))
        await asyncio.sleep(0)
        self.runner.problems = None
        self.clock.advance(5)
        while self.runner.problems is None:
            await asyncio.sleep(0.001)
        watching.cancel()

    async def fetch(self):
        """Let one cycle start; what it started ends if the host responds."""
        await self.runner.start_due()  # one at a time
        while self.release.is_set() and self.runner.tasks:
            await asyncio.sleep(0)

    def rows(self):
        return {row["name"]: row for row in self.runner.describe()}


@asynccontextmanager
async def service(folder):
    found = WatchedService(folder)
    async with found.runner, ControlServer(found.runner):
        yield found


async def test_a_file_is_picked_up_changed_and_removed_while_running(tmp_path, caplog):
    write(tmp_path / "sources", "a.yaml", "a", path="a")
    caplog.set_level("INFO")
    async with service(tmp_path) as here:
        await here.fetch()
        write(tmp_path / "sources", "b.yaml", "b", path="b")
        await here.check()
        await here.fetch()
        assert here.fetched == ["/a", "/b"]
        assert "added b: limited by provider fmp.test" in caplog.text
        before = here.rows()["a"]
        write(tmp_path / "sources", "a.yaml", "a", interval="10m", path="a2")
        await here.check()
        after = here.rows()["a"]
        assert (after["schedule"], after["ok"], after["last_at"]) == ("every 10m", 1, before["last_at"])
        here.clock.advance(600)
        await here.fetch()
        assert here.fetched == ["/a", "/b", "/a2"]
        (tmp_path / "sources" / "a.yaml").unlink()
        await here.check()
        assert here.rows().keys() == {"b"}
        here.clock.advance(3600)
        await here.fetch()
        assert here.fetched[3:] == ["/b"]


async def test_a_source_whose_file_returns_keeps_its_results_and_its_next_time(tmp_path):
    file = write(tmp_path / "sources", "a.yaml", "a")
    async with service(tmp_path) as here:
        await here.fetch()
        before = here.rows()["a"]
        text = file.read_text()
        file.unlink()
        await here.check()
        assert here.rows() == {}
        file.write_text(text)
        await here.check()
        assert here.rows()["a"] == before
        await here.fetch()
        assert here.fetched == ["/x"]


async def test_a_source_that_changes_while_it_is_fetched_is_not_fetched_twice_and_uses_its_new_schedule(tmp_path):
    write(tmp_path / "sources", "a.yaml", "a", path="old")
    async with service(tmp_path) as here:
        here.release.clear()
        await here.fetch()
        while not here.fetched:
            await asyncio.sleep(0)
        write(tmp_path / "sources", "a.yaml", "a", interval="5m", path="new")
        await here.check()
        await here.fetch()
        assert here.fetched == ["/old"]
        here.release.set()
        await here.fetch()
        assert here.rows()["a"]["due"] == (START + 5 * 60) * 1_000_000
        here.clock.advance(300)
        await here.fetch()
        assert here.fetched == ["/old", "/new"]


async def test_a_bad_file_is_reported_when_it_appears(tmp_path, caplog):
    write(tmp_path / "sources", "a.yaml", "a")
    async with service(tmp_path) as here:
        bad = tmp_path / "sources" / "b.yaml"
        bad.write_text("name: b\nurl: nowhere\n")
        await here.check()
        await here.check()
        assert caplog.text.count("a source file is invalid, it is ignored") == 1
        assert f"{bad}:2: url: expected a URL with a host" in here.runner.problems[0]
        reply = await asyncio.to_thread(send_command, tmp_path / "data", verb="sources")
        assert reply["problems"] == list(here.runner.problems)
        write(tmp_path / "sources", "b.yaml", "b")
        await here.check()
        assert (here.runner.problems, here.rows().keys()) == ((), {"a", "b"})


async def test_a_file_that_becomes_invalid_keeps_its_source(tmp_path, caplog):
    file = write(tmp_path / "sources", "a.yaml", "a", interval="2h")
    async with service(tmp_path) as here:
        file.write_text("name: a\n")
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 2h"
        assert "a source file is invalid, the previous version stays in effect" in caplog.text


async def test_a_folder_that_is_missing_for_a_moment_keeps_its_sources(tmp_path):
    write(tmp_path / "sources", "a.yaml", "a")
    async with service(tmp_path) as here:
        (tmp_path / "sources").rename(tmp_path / "elsewhere")
        await here.check()
        assert "cannot be listed" in here.runner.problems[0]
        assert here.rows().keys() == {"a"}


@pytest.mark.parametrize("file", ["0.yaml", "z.yaml"])
async def test_a_file_that_takes_the_name_of_another_one_is_ignored_until_that_is_gone(tmp_path, caplog, file):
    first = write(tmp_path / "sources", "a.yaml", "a", interval="2h")
    async with service(tmp_path) as here:
        second = write(tmp_path / "sources", file, "a", interval="3h")
        await here.check()
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 2h"
        assert caplog.text.count(f"{second} and {first}: two sources are named 'a'") == 1
        first.unlink()
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 3h"
        write(tmp_path / "sources", "b.yaml", "b")
        await here.check()
        write(tmp_path / "sources", "b.yaml", "a")
        await here.check()
        assert here.rows().keys() == {"a", "b"}  # the previous version of b.yaml


async def test_an_added_source_stays_in_effect_whatever_happens_to_the_file_of_the_same_name(tmp_path, caplog):
    file = write(tmp_path / "sources", "a.yaml", "a", interval="2h")
    added = "name: a\nurl: https://fmp.test/added\ninterval: 7h\n"
    async with service(tmp_path) as here:
        await asyncio.to_thread(send_command, tmp_path / "data", verb="add", text=added, file="a.yaml")
        write(tmp_path / "sources", "a.yaml", "a", interval="3h")
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 7h"
        assert "source a: the file has changed, but the version that 'tidegate add' stored" in caplog.text
        file.unlink()
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 7h"
        await asyncio.to_thread(send_command, tmp_path / "data", verb="remove", name="a")
        await here.check()
        assert here.rows() == {}
        write(tmp_path / "sources", "a.yaml", "a", interval="4h")
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 4h"


async def test_a_removed_source_returns_when_its_file_changes(tmp_path):
    write(tmp_path / "sources", "a.yaml", "a", interval="2h")
    async with service(tmp_path) as here:
        await asyncio.to_thread(send_command, tmp_path / "data", verb="remove", name="a")
        await here.check()
        assert here.rows() == {}
        write(tmp_path / "sources", "a.yaml", "a", interval="3h")
        await here.check()
        assert here.rows()["a"]["schedule"] == "every 3h"


def test_two_files_with_the_same_name_are_refused_at_the_start(tmp_path):
    write(tmp_path / "sources", "a.yaml", "a")
    write(tmp_path / "sources", "b.yaml", "a")
    with pytest.raises(ConfigError, match="two sources are named 'a'; remove one"):
        ConfiguredSources([], [tmp_path / "sources"], tmp_path).load()
