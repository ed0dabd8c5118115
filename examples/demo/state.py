"""What a training run leaves on disk for the comparison: plain tensors, loadable without running any code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

GROUPS = ("losses", "weights", "statistics", "optimizer", "random")
"""Parts of a saved state; statistics are the buffers, which in the demo are BatchNorm's."""

State = dict[str, dict[str, Tensor]]


def save_state(path: Path, losses: Sequence[Tensor], module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write losses, parameters, buffers, optimizer state and the random state to `path`."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    state: State = {
        "losses": {f"step {index}": loss for index, loss in enumerate(losses)},
        "weights": {name: parameter.detach() for name, parameter in module.named_parameters()},
        "statistics": dict(module.named_buffers()),
        "optimizer": {
            f"{names[id(parameter)]}.{key}": value
            for parameter, values in optimizer.state.items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        },
        "random": {"cpu": torch.get_rng_state()},
    }
    if torch.cuda.is_available():
        state["random"]["cuda"] = torch.cuda.get_rng_state()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path)


def load_state(path: Path) -> State:
    """Read what `save_state` wrote, tensors only, onto the CPU.

    Raises:
        ValueError: If the file is not such a state.
    """
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict) or tuple(state) != GROUPS:
        raise ValueError(f"{path} holds no saved run; expected the parts {', '.join(GROUPS)}")
    return state
