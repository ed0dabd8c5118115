"""``python -m lightning_offload.cli``."""

from __future__ import annotations

from lightning_offload.cli.app import main

if __name__ == "__main__":
    main()
