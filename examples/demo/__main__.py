"""`python -m examples.demo`: the demo, whose pages and figures stay in build/demo."""

from __future__ import annotations

import sys
from pathlib import Path

from examples.demo.program import main

if __name__ == "__main__":
    sys.exit(main(folder=Path("build/demo")))
