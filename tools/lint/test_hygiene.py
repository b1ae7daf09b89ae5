"""The repository: portable files, a hashed lock, the documented commands, a reason beside each lint exception."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names():
    """Every file that git tracks or would."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no telling which files belong to the project")
    # Accept a checkout that belongs to another user (root in a container).
    command = [git, "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return list(filter(None, output.split("\0")))


@pytest.fixture(scope="module")
def texts(names):
    """The text files of the project, by their path."""
    found = {}
    for name in names:
        path = ROOT / name
        if path.is_file() and b"\0" not in (content := path.read_bytes()):
            found[name] = content.decode("utf-8")
    return found


def places(texts, pattern):
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if re.search(pattern, line)
    ]


def test_no_absolute_path_of_a_machine(texts):
    # [/] keeps these patterns from finding themselves.
    homes = r"(?<![\w.])[/](root|home/\w+|Users/\w+|work|opt/pypi)[/]"
    here = re.escape(f"{ROOT}/")
    assert places(texts, f"{homes}|{here}") == []


def test_no_links_and_no_environments(names):
    assert [name for name in names if (ROOT / name).is_symlink() or name.startswith(".venv")] == []


def test_no_address_of_a_package_registry(texts):
    assert places(texts, r"(index|extra)[-_]url|find[-_]links|files[.]pythonhosted|pypi[.]org/simple") == []


# An exception that a signal handler raises in a method of these classes can leave the inner lock locked, since the
# methods are written in Python. `with` of a Lock or RLock is safe: its methods are written in C.
UNSAFE_PRIMITIVES = r"threading[.](Condition|Event|Semaphore|BoundedSemaphore|Barrier)\("
OWN_THREADS_ONLY = ["src/tidegate/bus/_inbox.py", "src/tidegate/testing/_bus_kit.py"]


def test_threads_of_callers_share_no_primitive_that_an_exception_can_leave_locked(texts):
    sources = {name: text for name, text in texts.items() if name.startswith("src/") and name.endswith(".py")}
    found = {place.partition(":")[0] for place in places(sources, UNSAFE_PRIMITIVES)}
    assert sorted(found) == OWN_THREADS_ONLY, "use tidegate._runtime.clock.ThreadSignal or tidegate._runtime.lock.Lock"


LOCKS = ["requirements.lock", "requirements-run.lock"]


@pytest.mark.parametrize("name", LOCKS)
def test_lock_is_hashed_and_names_no_host(texts, name):
    lock = texts[name]
    assert not re.search(r"://|^-|\s@\s", lock, re.MULTILINE), "an address, an option or a direct reference"
    pinned = re.split(r"\n(?=\S)", lock.strip())
    assert len(pinned) > 20
    hashed = re.compile(r"[\w.-]+==\S+.*\\\n    --hash=sha256:[0-9a-f]{64}")
    assert [entry for entry in pinned if not hashed.match(entry)] == []


def test_lock_contains_the_dependencies_of_pyproject(texts):
    project = tomllib.loads(texts["pyproject.toml"])
    asked = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    names = {normal(re.split(r"[^\w.-]", entry)[0]) for entry in asked} - {"tidegate"}
    locked = {normal(name) for name in re.findall(r"^([\w.-]+)==", texts["requirements.lock"], re.MULTILINE)}
    assert names <= locked, f"run make lock: {sorted(names - locked)}"


def test_both_locks_agree(texts):
    tests, run = (dict(re.findall(r"^([\w.-]+)==(\S+)", texts[name], re.MULTILINE)) for name in LOCKS)
    assert {name: version for name, version in run.items() if tests.get(name) != version} == {}


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


@cases(
    "target", ["run", "test", "test-all", "lint", "format", "docs", "bench", "mutants", "soak", "lock", "clean", "help"]
)
def test_makefile_describes_each_documented_command(texts, target):
    assert re.search(rf"^{target}:.*## \S", texts["Makefile"], re.MULTILINE)


def test_ci_runs_lint_and_all_tests(texts):
    assert re.findall(r"^make [\w-]+$", texts[".ci/run"], re.MULTILINE) == ["make lint", "make test", "make test-more"]
    assert re.search(r"^test-all: test test-more ", texts["Makefile"], re.MULTILINE)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_each_lint_exception_has_its_reason_beside_it(texts):
    pyproject = texts["pyproject.toml"]
    section = pyproject.partition("[tool.ruff.lint]")[2].partition("[tool.ruff.lint.pydocstyle]")[0]
    rules = [line for line in section.splitlines() if re.match(r'\s+"[A-Z]+\d*"', line)]
    assert rules
    assert [line for line in rules if not re.search(r'",\s+# \S+ \S+', line)] == []
    ruff = tomllib.loads(pyproject)["tool"]["ruff"]["lint"]
    listed = [*ruff["ignore"], *(rule for rules in ruff["per-file-ignores"].values() for rule in rules)]
    assert len(rules) == len(listed), "one rule on each line, or its reason is not beside it"


def test_each_silenced_line_has_its_reason_beside_it(texts):
    """The form is `noqa: S101 - reason`, and `type: ignore[code]  # reason`."""
    python = {name: text for name, text in texts.items() if name.endswith(".py")}
    marks = places(python, r"#\s*(noqa|type:\s*ignore)\b")
    reasons = r"[#] noqa: [A-Z]+\d+(, ?[A-Z]+\d+)* - \w+|[#] type: ignore\[[\w, -]+\]\s+# \w+"
    assert [mark for mark in marks if not re.search(reasons, mark)] == []


def python_tests(texts):
    return {name: text for name, text in texts.items() if name.startswith("tests/") and name.endswith(".py")}


def test_no_skip_without_a_reason(texts):
    assert places(python_tests(texts), r"pytest[.](mark[.])?skip(\(\)|$)") == []


XFAIL = re.compile(r"pytest[.](?:mark[.])?xfail\b(?!\([^)]*issue \d+)")


def test_an_expected_failure_names_its_issue(texts):
    """What fails is repaired, or waits for an issue: reason="issue 35: 1.5 % of the calls are refused, not 1 %"."""
    assert [name for name, text in python_tests(texts).items() if XFAIL.search(text)] == []
    assert XFAIL.search("@pytest.mark.xfail(strict=True, reason='sometimes')")
    assert not XFAIL.search("@pytest.mark.xfail(\n    strict=True, reason='issue 35: sometimes')")


def test_no_test_replaces_our_classes_by_mocks(texts):
    assert places(python_tests(texts), r"\b(Magic|Async)?Mock\(|create_autospec") == []
