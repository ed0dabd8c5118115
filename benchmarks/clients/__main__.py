"""`python -m benchmarks.clients [NAME ...]`: `python -m benchmarks clients` for some of them, or for all."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    names = sys.argv[1:]
    sys.exit(main(["clients", *(["--cases", *names] if names else [])]))
