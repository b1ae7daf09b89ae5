"""Builds and checks a release: `make release`. Publishes nothing.

1. builds the sdist and the wheel into dist/
2. compares the wheel with the files of the package that git tracks, and checks the metadata (twine)
3. installs the wheel with each extra alone into an empty environment, on every Python that is installed, and runs
   tools/smoke.py there
4. lists the licences of all dependencies, refuses those that are not in ACCEPTED, and writes an SBOM (CycloneDX)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
NOT_RELEASED = ("dev", "build")  # extras for development
MUST_HAVE = ("py.typed", "stores/_redis/core.lua", "stores/_postgres/core.sql", "service/_dashboard/static/index.html")
# Permissive licences, and those with conditions only on changes of the package itself (psycopg: LGPL; certifi: MPL).
ACCEPTED = ("Apache", "BSD", "MIT", "ISC", "PSF", "Python Software Foundation", "MPL", "Mozilla", "Unlicense", "LGPL")


def run(*command: str | Path, cwd: str | Path | None = None) -> str:
    """Run a command; show its output if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return str(done.stdout)


def build() -> Path:
    """Build the sdist and the wheel; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-d", DIST, cwd=ROOT)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    (wheel,) = DIST.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Check that the wheel has the tracked files of the package, and nothing else."""
    tracked = run("git", "ls-files", "src/tidegate", cwd=ROOT).split()
    expected = {name.removeprefix("src/") for name in tracked}
    with ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != expected:
        missing, extra = sorted(expected - found), sorted(found - expected)
        sys.exit(f"the wheel differs from the package: missing {missing}, unexpected {extra}")
    missing = [name for name in MUST_HAVE if f"tidegate/{name}" not in found]
    if missing:
        sys.exit(f"the wheel lacks {missing}")
    print(f"contents: {len(found)} files, {wheel.stat().st_size // 1024} KB")


def find_extras() -> list[str]:
    """Return the extras that users install; the empty one is the package alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return ["", *(name for name in project["optional-dependencies"] if name not in NOT_RELEASED)]


def try_extras(wheel: Path, extras: list[str], versions: list[str]) -> None:
    """Install each extra alone, on each Python, and run the smoke test."""
    for version in versions:
        python = run(ROOT / "tools" / "find-python", version).strip()
        if not python:
            print(f"Python {version} is not installed: not tried")
            continue
        for extra in extras:
            with tempfile.TemporaryDirectory() as folder:
                run(python, "-m", "venv", folder)
                pip = [f"{folder}/bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
                run(*pip, f"{wheel}[{extra}]" if extra else wheel)
                smoke = run(f"{folder}/bin/python", ROOT / "tools" / "smoke.py", extra, cwd=folder)
                print(f"Python {version}, {smoke.strip()}", flush=True)


def check_licences(wheel: Path) -> None:
    """Install everything, write the SBOM, and check the licence of each package."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        python = f"{folder}/bin/python"
        run(python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", f"{wheel}[all]")
        sbom = DIST / "sbom.cdx.json"
        run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-file", sbom, python)
        listed = run(sys.executable, "-m", "piplicenses", f"--python={python}", "--format=json", "--from=mixed")
    packages = json.loads(listed)
    refused = [f"{p['Name']} ({p['License']})" for p in packages if not any(word in p["License"] for word in ACCEPTED)]
    if refused:
        sys.exit(f"licences to look at: {', '.join(refused)}")
    components = len(json.loads(sbom.read_text(encoding="utf-8"))["components"])
    print(
        f"licences: {len(packages)} packages, all accepted; SBOM: {components} components in {sbom.relative_to(ROOT)}"
    )


def main() -> None:
    """Run all steps; arguments choose extras (`--extra=redis`) and versions (`--python=3.12`)."""
    chosen = [each.removeprefix("--extra=") for each in sys.argv[1:] if each.startswith("--extra=")]
    versions = [each.removeprefix("--python=") for each in sys.argv[1:] if each.startswith("--python=")]
    wheel = build()
    check_contents(wheel)
    try_extras(wheel, chosen or find_extras(), versions or list(VERSIONS))
    check_licences(wheel)
    print(f"checked: {', '.join(path.name for path in sorted(DIST.iterdir()))}")


if __name__ == "__main__":
    main()
