"""The Colab notebook, as far as a CPU allows: its cells run in order with the embedded family."""

import json
from pathlib import Path

NOTEBOOK = json.loads((Path(__file__).parents[2] / "assets" / "flashspec_colab.ipynb").read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_four_cells_with_cleared_outputs() -> None:
    assert len(CODE) == 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


def test_the_cells_start_the_page(monkeypatch, capsys) -> None:
    from flashspec.ui import page

    launched = {}

    def launch(demo, **how):
        launched.update(how, demo=demo)

    monkeypatch.setattr(page, "launch", launch)
    monkeypatch.setenv("FLASHSPEC_SHARE", "0")
    monkeypatch.setenv("FLASHSPEC_DEBUG", "0")
    names: dict = {}
    for cell in CODE:
        exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "installed: True" in printed
    assert launched["demo"].title == page.TITLE
    assert (launched["share"], launched["debug"]) == (False, False)


def test_every_family_of_the_form_is_in_the_catalogue() -> None:
    import re

    from flashspec.models.catalog import EMBEDDED, FAMILIES, HUB_IDS

    form = next("".join(cell["source"]) for cell in CODE if "FAMILY =" in "".join(cell["source"]))
    offered = re.findall(r'"([^"]+)"', form.split("@param", 1)[1].splitlines()[0])
    assert offered == list(FAMILIES)
    for entry in FAMILIES.values():
        assert all(model in EMBEDDED or model in HUB_IDS for model in (entry.target, *entry.drafters))
