"""Check with pyright that the examples have no type errors, and that the package declares its types.

The type completeness score of `pyright --verifytypes` must be at least MIN_SCORE.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MIN_SCORE = 0.98  # of public names; classes of Django and its REST Framework have no types
MAX_SHOWN = 20  # symbols without a known type that are listed


def run_pyright(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pyright with the packages of this interpreter, which it looks for on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [sys.executable, "-m", "pyright", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, check=False, capture_output=True, text=True
    )


def check_examples() -> bool:
    """Check the files that pyproject.toml names."""
    result = run_pyright()
    print(result.stdout.strip() or result.stderr.strip())
    return result.returncode == 0


def check_completeness() -> bool:
    """Check that nearly all public symbols have a declared type."""
    result = run_pyright("--verifytypes", "tidegate", "--ignoreexternal", "--outputjson")
    report = json.loads(result.stdout)["typeCompleteness"]
    score = report["completenessScore"]
    print(f"type completeness: {score:.1%}")
    if score >= MIN_SCORE:
        return True
    unknown = [each["name"] for each in report["symbols"] if each["isExported"] and not each["isTypeKnown"]]
    print(f"at least {MIN_SCORE:.0%} is required; declare the types of:", *unknown[:MAX_SHOWN], sep="\n  ")
    return False


if __name__ == "__main__":
    sys.exit(not all([check_examples(), check_completeness()]))
