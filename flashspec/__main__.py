"""`python -m flashspec`."""

from flashspec.cli import main

raise SystemExit(main())
