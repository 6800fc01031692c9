"""Names of public classes are unique in the package."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import kvferry

ROOT = Path(kvferry.__file__).parent
CLASS = re.compile(r"^ *class ([A-Z]\w*)[(:]", re.MULTILINE)


def public_classes() -> dict[str, list[str]]:
    """Return the modules that define a public class, by the name of the class."""
    found = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for name in CLASS.findall(path.read_text(encoding="utf-8")):
            found[name].append(str(path.relative_to(ROOT)))
    return found


def test_no_public_class_name_is_used_twice() -> None:
    found = public_classes()
    assert found["Endpoint"] == ["core/endpoint/endpoint.py"]
    repeated = {name: paths for name, paths in found.items() if len(paths) > 1}
    assert not repeated, f"rename one of each pair: {repeated}"
