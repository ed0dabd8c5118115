"""Says whether two saved runs are the same, bit for bit: `python -m examples.demo.compare PLAIN OURS`.

It is a program of its own so that nothing of the runs' process, neither a patched function nor a live tensor,
has a say in the verdict. It uses nothing of the library. The last line of its output is one JSON object
with a verdict per part, `identical` for all of them, and the first difference found. Exit status: 0
identical, 1 different, 2 no comparison possible.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.demo.state import GROUPS, State, load_state


def compare(plain: State, ours: State) -> dict[str, Any]:
    """Compare two states tensor by tensor.

    Returns:
        A bool per part of the state, `identical`, `num_tensors` (compared) and `first_difference`, a text or
        None.
    """
    verdict: dict[str, Any] = {}
    differences: list[str] = []
    for group in GROUPS:
        found = [f"{group}: {text}" for text in _differences(plain[group], ours[group])]
        # A part without a single tensor proves nothing.
        verdict[group] = not found and bool(plain[group])
        differences += found
    identical = all(verdict.values())
    num_tensors = sum(len(plain[group]) for group in GROUPS)
    first = differences[0] if differences else None
    return {**verdict, "identical": identical, "num_tensors": num_tensors, "first_difference": first}


def _differences(plain: dict[str, Tensor], ours: dict[str, Tensor]) -> list[str]:
    """Return one line per tensor that is missing or differs."""
    missing = [f"{name} is in one run only" for name in sorted(plain.keys() ^ ours.keys())]
    common = [name for name in plain if name in ours]
    return missing + [f"{name} differs" for name in common if not same_bits(plain[name], ours[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bytes, nans included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the two files named on the command line and print the verdict."""
    paths = list(sys.argv[1:] if arguments is None else arguments)
    if len(paths) != 2:
        sys.stderr.write("usage: python -m examples.demo.compare PLAIN OURS\n")
        return 2
    try:
        plain, ours = (load_state(Path(path)) for path in paths)
    except Exception as error:  # whatever a damaged file makes of torch.load
        sys.stderr.write(f"cannot compare {paths[0]} and {paths[1]}: {error}\n")
        return 2
    verdict = compare(plain, ours)
    sys.stdout.write(json.dumps(verdict) + "\n")
    return 0 if verdict["identical"] else 1


if __name__ == "__main__":
    sys.exit(main())
