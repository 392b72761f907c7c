"""Fixtures shared by all rooms. Two threads on two cores, passive waiting: as the page runs."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from flashspec.models.catalog import Family, load_family


@pytest.fixture(scope="session")
def embedded() -> Family:
    return load_family("embedded")
