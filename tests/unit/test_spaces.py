"""On a ZeroGPU Space, as far as it can be seen without one: a stand-in for the package `spaces`."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

STAND_IN = """
import sys
assert "torch" not in sys.modules, "spaces must be imported before torch"
borrowed = []


def GPU(duration):
    def wrap(function):
        borrowed.append((function.__name__, duration("any", "values")))
        return function

    return wrap
"""


def test_spaces_comes_first_and_every_run_borrows_a_gpu(tmp_path) -> None:
    (tmp_path / "spaces.py").write_text(STAND_IN)
    script = (
        "import runpy, sys; sys.argv = ['app.py'];"
        "import flashspec; app = runpy.run_path('app.py', run_name='app');"
        "import spaces; app['build']('embedded'); print(sorted(spaces.borrowed))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**__import__("os").environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "('_run', 120), ('_run_race', 120), ('generate', 120)" in done.stdout


def test_space_card_names_what_runs() -> None:
    import re

    card = (ROOT / "README.md").read_text(encoding="utf-8").split("---")[1]
    for key in (
        "title",
        "sdk",
        "sdk_version",
        "python_version",
        "app_file",
        "short_description",
        "license",
        "models",
        "preload_from_hub",
        "tags",
    ):
        assert re.search(rf"^{key}:", card, re.MULTILINE), key
    assert len(re.search(r"short_description: (.+)", card)[1]) <= 60
    assert (ROOT / re.search(r"app_file: (\S+)", card)[1]).exists()
