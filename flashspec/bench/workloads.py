"""Prompts to measure on, the project's own by kind of work or a file in the format of Spec-Bench, and the file of results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flashspec.models.catalog import assets

# Spec-Bench names a turn of MT-Bench by its topic; together they are its "chat".
_CHAT = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


def workloads(path: str | None = None) -> dict[str, list[str]]:
    """Prompts by workload. path: JSON lines with `category` and `turns`, the first turn being asked.

    Raises ValueError with a sentence where the file cannot be read.
    """
    if path is None:
        return dict(json.loads((assets() / "prompts.json").read_text(encoding="utf-8")))
    grouped: dict[str, list[str]] = {}
    try:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            category = "chat" if row["category"] in _CHAT else row["category"].replace("_", " ")
            grouped.setdefault(category, []).append(row["turns"][0])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} cannot be read as prompts ({error}); give JSON lines with category and turns."
        ) from None
    return grouped


def save(benchmark: str, result: dict[str, Any], path: Path) -> None:
    """Put a result into a JSON file that holds one for each family, prompts and temperature."""
    key = lambda r: (r["family"], r["prompts"], r["temperature"])  # noqa: E731
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    runs = sorted([r for r in kept if key(r) != key(result)] + [result], key=key)
    path.write_text(
        json.dumps({"benchmark": benchmark, "runs": runs}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )
