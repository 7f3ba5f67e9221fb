"""`python -m reshard_cli`, as torchrun starts it."""

from __future__ import annotations

from reshard_cli.cli.main import main

if __name__ == "__main__":
    main()
