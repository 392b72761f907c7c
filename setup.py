"""Carries the folders that lie beside the package in a checkout, kernels/ and assets/, inside the installed one."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFolders(build_py):
    def run(self) -> None:
        super().run()
        root, package = Path(__file__).parent, Path(self.build_lib) / "flashspec"
        if self.editable_mode:
            return
        for source in (root / "kernels").glob("*.py"):
            shutil.copy(source, package / "kernels")
        shutil.copytree(root / "assets", package / "assets", dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
