"""The command line, ``lightning-offload COMMAND``: the top layer, a thin face on what the layers below do.

One file a command; ``commands`` declares them with their options to Typer, ``app`` runs them and turns errors into
one line and an exit code. Neither Typer nor torch is imported before a command needs it.
"""

from __future__ import annotations

from lightning_offload.cli.app import main, run

__all__ = ["main", "run"]
