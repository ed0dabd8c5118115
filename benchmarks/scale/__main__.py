"""Command line of the simulation: `python -m benchmarks.scale MODULE:ATTRIBUTE [OPTION ...]`, see docs/scale.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_offload.cli import app

if TYPE_CHECKING:
    import typer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for, as `lightning-offload` runs its commands; returns the exit status."""
    return app.run(arguments, build=_build, program="python -m benchmarks.scale")


def _build() -> typer.Typer:
    from benchmarks.scale.command import build_app

    return build_app()


if __name__ == "__main__":
    sys.exit(main())
