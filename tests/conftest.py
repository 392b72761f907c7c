"""Fixtures shared by all rooms. Every worker has its share of the cores, whose threads wait as on the page."""

import os

os.environ.setdefault(
    "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
)
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from flashspec.machine import reason_without_numba
from flashspec.models.catalog import Family, load_family
from flashspec.models.lean import NUMBA


@pytest.fixture(scope="session")
def embedded() -> Family:
    """As users get it: our own forward on int8 weights, whatever a measurement on this machine would choose."""
    return load_family("embedded", layout="int8" if reason_without_numba() else NUMBA)


@pytest.fixture(scope="session")
def embedded_float32() -> Family:
    """The same models in float32 through transformers."""
    return load_family("embedded", layout="transformers")
