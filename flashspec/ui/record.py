"""Record the run that the page shows before the first click: python -m flashspec.ui.record [PROMPT] [--tokens N] [--seed N]."""

from __future__ import annotations

import argparse
import json

from flashspec.models.catalog import assets
from flashspec.ui import live

PROMPT = "Write a Python function that counts the words of a text, then print it again with a docstring."


def main() -> None:
    parser = argparse.ArgumentParser(description="Record assets/page/recording.json on this machine.")
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    controls = live.Controls(
        options.prompt, "embedded", live.BANDIT, 3, "block", 0.7, 1.0, options.tokens, options.seed, "torch"
    )
    list(live.messages(controls))  # the first run on cold caches is not the one to show
    recorded = [json.loads(message) for message in live.messages(controls)]
    path = assets() / "page" / "recording.json"
    path.write_text(json.dumps({"recording": recorded}, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes, {recorded[-1]['totals']}")


if __name__ == "__main__":
    main()
