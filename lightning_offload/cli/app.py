"""Runs the command line: what a command raises on purpose ends as one line on standard error and an exit code."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lightning_offload.errors import BudgetInfeasibleError, OffloadError

if TYPE_CHECKING:
    import typer

NOT_INSTALLED = 1
BAD_INPUT = 2
INFEASIBLE = 3
ABORTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: What follows the program's name; by default what the process was given.
    """
    sys.exit(run(arguments))


def _commands() -> typer.Typer:
    from lightning_offload.cli.commands import build_app

    return build_app()


def run(
    arguments: Sequence[str] | None = None,
    *,
    build: Callable[[], typer.Typer] = _commands,
    program: str = "lightning-offload",
) -> int:
    """Run the command line.

    Args:
        arguments: What follows the program's name; by default what the process was given.
        build: Makes the application, once Typer is known to be there.
        program: The name that help calls it by.

    Returns:
        The exit code: 0; 1 without Typer; 2 for what the user can mend, bad input above all; 3 where no plan meets
        the budget; 130 when interrupted.
    """
    try:
        import typer
    except ImportError:
        return _complain("the command line needs typer: pip install 'lightning-offload[cli]'", NOT_INSTALLED)
    command = typer.main.get_command(build())
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may not know each letter
    try:
        code = command.main(arguments, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except BudgetInfeasibleError as error:
        return _complain(str(error), INFEASIBLE)
    except OffloadError as error:
        return _complain(str(error), BAD_INPUT)
    except (typer.Abort, KeyboardInterrupt):
        return _complain("aborted", ABORTED)
    except BrokenPipeError:
        _write_nowhere()
        return 0
    except SystemExit as error:
        if error.code != 1:
            raise
        _write_nowhere()
        return 0  # by rich, where nobody reads any more
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG):
            raise
        _write_nowhere()
        return _complain(f"the output cannot be written: {error.strerror}", BAD_INPUT)
    except Exception as error:
        # What Typer finds wrong is an exception of the click within it, or of the one beside older versions of it.
        if not hasattr(error, "format_message"):
            raise
        return _complain(error.format_message(), BAD_INPUT)
    return code if isinstance(code, int) else 0


def _write_nowhere() -> None:
    """Have the interpreter find nothing to complain of when it writes what is left at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"lightning-offload: error: {' '.join(message.split())}\n")
    return code
