"""Print the lowest versions that pyproject.toml allows, as constraints for pip: name==version.

python tools/lowest.py [EXTRA …] > build/lowest.txt
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def list_lowest(extras: list[str]) -> list[str]:
    """Return "name==version" of each direct dependency, and of those of the extras. Raises ValueError for no bound."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    lowest = []
    for text in wanted:
        requirement, _, marker = text.partition(";")
        found = re.fullmatch(r"([\w.-]+)(?:\[[\w,-]+\])?>=([\w.]+)\s*", requirement)
        if requirement.startswith("attnlab["):
            continue
        if found is None:
            raise ValueError(f"{text} in pyproject.toml has no lower bound of the form name>=version")
        lowest.append(f"{found[1]}=={found[2]}" + (f";{marker}" if marker else ""))
    return sorted(set(lowest))


if __name__ == "__main__":
    print("\n".join(list_lowest(sys.argv[1:])))
