"""The Triton sources of `kernels/`, importable as `flashspec.kernels.NAME`.

In a checkout they lie in the folder `kernels/` beside the package, which is no package itself so as not to shadow the PyPI package of
that name; an installed wheel carries them in here.
"""

from pathlib import Path

_checkout = Path(__file__).resolve().parents[2] / "kernels"
if (_checkout / "verify.py").exists():
    __path__.append(str(_checkout))
