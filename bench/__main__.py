"""Runs a command: python -m bench NAME [options]."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from . import COMMANDS


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] in COMMANDS:
        sys.exit(import_module(f"bench.{argv[0]}").main(argv[1:]))
    print("python -m bench NAME [options]; python -m bench NAME --help lists the options.\n")
    for name, text in COMMANDS.items():
        print(f"    {name:12}{text}")
    if argv and not argv[0].startswith("-"):
        raise SystemExit(f"\nno command {argv[0]!r}; the names are {', '.join(COMMANDS)}")


if __name__ == "__main__":
    main(sys.argv[1:])
