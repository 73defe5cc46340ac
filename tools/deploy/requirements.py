"""Print requirements of pyproject.toml, one per line: `python requirements.py pyproject.toml [EXTRA ...]`.

The image installs them before Tridecode, in a layer that changes of the code do not invalidate. The script
runs in the image's Python 3.10 or later, with no package except pip.
"""

from __future__ import annotations

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def requirements(path: Path, *extras: str) -> list[str]:
    """Return the dependencies of the project and of these extras. Raises KeyError for an unknown extra."""
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return project["dependencies"] + [line for extra in extras if extra for line in optional[extra]]


if __name__ == "__main__":
    print("\n".join(requirements(Path(sys.argv[1]), *sys.argv[2:])))
