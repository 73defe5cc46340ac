"""Names the platform of the wheel; pyproject.toml has everything else.

A wheel with the compiled kernels is for this system and any Python 3; one without them is for every system.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        if any(Path("kernels/lib").glob("*.so")):  # loaded by ctypes: no ABI of Python
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        return python, abi, platform


setup(cmdclass={"bdist_wheel": Wheel})
