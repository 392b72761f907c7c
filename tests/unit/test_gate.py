"""Rules about the project itself."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def python(code: str, cwd: Path = ROOT, path: str = "") -> str:
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_run_one_way() -> None:
    everything = "flashspec.engine, flashspec.cli, flashspec.check, flashspec.exactness, flashspec.models.catalog, flashspec.drafters"
    loaded = python(f"import sys, {everything}; print({{'gradio', 'plotly'}} & sys.modules.keys())")
    assert loaded.strip() == "set()"
    assert python("import sys, flashspec.bandits, flashspec.records; print('torch' in sys.modules)").strip() == "False"
    for file in (ROOT / "flashspec").rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        below_ui = "ui" not in file.relative_to(ROOT / "flashspec").parts
        if below_ui:
            assert not re.search(r"^\s*(import|from) (gradio|plotly)|flashspec\.ui", source, re.MULTILINE), file


def test_nothing_is_fetched_at_import() -> None:
    python(
        "import socket\ndef no(*_): raise SystemExit('network')\nsocket.socket.connect = no\nimport flashspec.models.pull, flashspec.models.catalog"
    )


def test_nothing_linux_only_in_the_base_install() -> None:
    base = " ".join(PROJECT["project"]["dependencies"])
    assert "triton" not in base
    assert "bitsandbytes" not in base
    triton = next(d for d in PROJECT["project"]["optional-dependencies"]["gpu"] if d.startswith("triton"))
    assert "sys_platform == 'linux'" in triton
    assert "x86_64" in triton


@pytest.mark.parametrize("package", ["triton", "bitsandbytes"])
def test_runs_without_the_optional_packages(package) -> None:
    code = f"import sys; sys.modules['{package}'] = None\nfrom flashspec import cli; raise SystemExit(cli.main(['models']))"
    assert "embedded" in python(code)


def test_ruff_and_mypy_are_clean() -> None:
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_kernels_folder_does_not_shadow_the_package(tmp_path) -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("WHO = 'PyPI'")
    assert python("import kernels; print(kernels.WHO)", path=str(tmp_path)).strip() == "PyPI"


def test_one_version_of_gradio() -> None:
    readme = re.search(r"^sdk_version: (\S+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    pin = re.search(r"^gradio==(\S+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE)
    page = PROJECT["project"]["optional-dependencies"]["page"]
    assert readme
    assert pin
    assert [need for need in page if need.startswith("gradio")] == [f"gradio=={pin[1]}"]
    assert readme[1] == pin[1]


def test_readme_has_its_two_commands() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for mark in ("page", "test"):
        command = re.search(rf"<!-- {mark} -->\n```sh\n(.+)\n```", readme)
        assert command
        assert "venv" in command[1]


def test_the_tree_still_travels() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")[
        :-1
    ]
    if not tracked:
        pytest.skip("not a git checkout")
    assert (
        sum((ROOT / name.decode()).stat().st_size for name in tracked if (ROOT / name.decode()).exists()) < 50 * 2**20
    )
