"""`python -m examples.demo`: the package's demo, whose pages and figures stay in build/demo.

`lightning-offload demo` runs the same; see `lightning_offload.demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_offload.demo.program import main

if __name__ == "__main__":
    sys.exit(main(folder=Path("build/demo")))
