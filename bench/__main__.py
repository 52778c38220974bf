"""The front door: python -m bench NAME [options]."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from . import BENCHMARKS


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] in BENCHMARKS:
        sys.exit(import_module(f"bench.{argv[0]}").main(argv[1:]))
    print("python -m bench NAME [options]; --help tells a benchmark's options.\n")
    for name, text in BENCHMARKS.items():
        print(f"    {name:12}{text}")
    if argv and not argv[0].startswith("-"):
        raise SystemExit(f"\nno benchmark {argv[0]!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
