"""The wheel carries everything and runs away from the checkout, without Triton and bitsandbytes, as on macOS and Windows."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_runs_away_from_the_checkout(tmp_path) -> None:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    wheel = next(tmp_path.glob("flashspec-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    for needed in (
        "flashspec/assets/page/live.js", "flashspec/assets/page/recording.json", "flashspec/assets/models/tiny/model.int8.safetensors",
        "flashspec/assets/prompts.json", "flashspec/assets/benchmarks/verify_h200.json", "flashspec/kernels/verify.py", "flashspec/kernels/forward.py",
    ):  # fmt: skip
        assert needed in names
    script = (
        "import sys; sys.modules['triton'] = sys.modules['bitsandbytes'] = None;"
        "import flashspec; assert 'site' in flashspec.__file__, flashspec.__file__;"
        "from flashspec.cli import main; code = main(['generate', 'Name two birds.', '--max-new-tokens', '8']);"
        "from flashspec.ui.page import build; build(); print('page built'); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 tokens in" in done.stdout
    assert "page built" in done.stdout
