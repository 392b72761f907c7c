"""Start the page: python app.py [--host HOST] [--port PORT] [--share] [--family NAME]."""

import argparse
import contextlib
import os

# Before torch: waiting threads spin for some microseconds, then sleep (see flashspec/cli.py).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

with contextlib.suppress(ImportError):  # a Space on ZeroGPU has it, and it must come before torch
    import spaces  # noqa: F401

from flashspec.machine import keep_freed_memory
from flashspec.models.catalog import is_local
from flashspec.ui.page import build, launch


def main() -> None:
    parser = argparse.ArgumentParser(description="FlashSpec: watch a language model draft, verify and write.")
    parser.add_argument("--host", default=None, help="address to listen on (default 127.0.0.1; 0.0.0.0 for everyone)")
    parser.add_argument("--port", type=int, default=None, help="default: the first free one from 7860")
    parser.add_argument("--share", action="store_true", help="a public link through Gradio")
    parser.add_argument(
        "--family",
        default=None,
        help="the family shown first (default: smollm2-135m where it is on this machine, else embedded)",
    )
    options = parser.parse_args()
    keep_freed_memory()
    try:
        demo = build(options.family or ("smollm2-135m" if is_local("smollm2-135m") else "embedded"))
    except ValueError as error:
        parser.error(str(error))
    launch(demo, options.host, options.port, options.share)


if __name__ == "__main__":
    main()
