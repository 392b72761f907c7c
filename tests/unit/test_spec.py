"""SPEC.md and the tests must not drift apart."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "SPEC.md").read_text(encoding="utf-8")


def requirements(spec: str) -> dict[str, list[str]]:
    parts = re.split(r"^\*\*(R\d+)\.?", spec, flags=re.MULTILINE)[1:]
    return {
        name: re.findall(r"^Test: `(.+?)`", body, re.MULTILINE)
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def missing(spec: str) -> list[str]:
    gaps = []
    for requirement, tests in requirements(spec).items():
        if not tests:
            gaps.append(f"{requirement} names no test")
        for test in tests:
            path, _, name = test.partition("::")
            file = ROOT / path
            if not (
                file.name.startswith("test_")
                and file.exists()
                and re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE)
            ):
                gaps.append(f"{requirement} names {test}, which is not there")
    return gaps


def test_every_requirement_names_a_test() -> None:
    assert len(requirements(SPEC)) > 40
    assert missing(SPEC) == []


def test_a_missing_test_would_be_noticed() -> None:
    assert missing("**R1. A.** x\nTest: `tests/unit/test_spec.py::test_nothing`") != []
    assert missing("**R1. A.** x\n") != []
