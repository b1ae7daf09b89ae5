"""A module of src/ uses no private attribute that another module defines.

ruff reports private attributes of other objects (SLF001); a line may be exempt for third-party packages and for
functions beside their class, not for classes of another module.
"""

import re
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
USED = re.compile(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)")
DEFINED = re.compile(r"(?:def |self\.|cls\.|^    )(_[a-z]\w*)\b(?= *[(:=])", re.MULTILINE)
KNOWN = {
    ("outbound/aiohttp.py", "_replace"),  # of a NamedTuple
}


def foreign_names(texts):
    defined = {path: set(DEFINED.findall(text)) for path, text in texts.items()}
    return [
        (path, name)
        for path, text in texts.items()
        for line in text.splitlines()
        if "noqa: SLF001" in line
        for name in USED.findall(line.partition("#")[0])
        if name not in defined[path] and any(name in names for names in defined.values())
    ]


def test_no_module_uses_a_private_attribute_of_another():
    package = SOURCE / "tidegate"
    texts = {path.relative_to(package).as_posix(): path.read_text("utf-8") for path in package.rglob("*.py")}
    assert sorted({*foreign_names(texts)} - KNOWN) == []


def test_a_foreign_private_attribute_is_found():
    texts = {
        "a.py": "class A:\n    def _close(self): ...\n",
        "b.py": "a._close()  # noqa: SLF001 - why not\na._third_party()  # noqa: SLF001 - no other way\n",
    }
    assert foreign_names(texts) == [("b.py", "_close")]
