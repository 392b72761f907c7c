import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashspec.verifiers import reason_without_triton


@pytest.mark.skipif(reason_without_triton() is not None, reason=str(reason_without_triton()))
@pytest.mark.parametrize("capability", ["75", "80", "90"])
def test_kernels_compile_for(capability, tmp_path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    script = Path(__file__).with_name("compile_all.py")
    done = subprocess.run(
        [sys.executable, str(script), capability], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count(f"sm_{capability}") == 15
