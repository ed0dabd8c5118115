"""What each step of a run with changing lengths takes over a plain one: the plot of decision 25.

`python -m benchmarks.shapes.picture` draws that of the stored result again.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.results import draw_stored
from lightning_offload.errors import UnsupportedError

__all__ = ["PICTURE", "draw"]

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "shapes.png"

_INK, _FAINT = "#1f2937", "#9ca3af"
_COLORS = {"planned": "#2563eb", "recording": "#dc2626"}
_OTHER = "#d97706"
_HIGHEST = 4.0


def draw(runs: list[dict[str, Any]], path: Path = PICTURE) -> Path:
    """Draw one panel per run.

    Args:
        runs: Of each the title, and by step: length in tokens, seconds of a plain step, seconds, and phase.
        path: Where to.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError("the picture needs matplotlib: pip install matplotlib") from error
    figure = figure_module.Figure(figsize=(9, 3.2 * len(runs)), layout="constrained")
    for panel, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        ratios = [
            min(_HIGHEST, taken / plain) for taken, plain in zip(run["seconds"], run["plain_seconds"], strict=True)
        ]
        phases = ["planned" if phase == "planned" else phase for phase in run["phases"]]
        for phase in sorted(set(phases)):
            places = [place for place, other in enumerate(phases) if other == phase]
            sizes = [8 + 60 * run["lengths"][place] / max(run["lengths"]) for place in places]
            color = _COLORS.get(phase, _OTHER)
            panel.scatter(places, [ratios[p] for p in places], s=sizes, color=color, alpha=0.75, label=phase, lw=0)
        panel.axhline(1, color=_FAINT, lw=1)
        panel.set(ylim=(0.5, _HIGHEST * 1.03), xlabel="step", ylabel="time over a plain step")
        panel.set_title(f"{run['title']}; larger dots are longer batches", loc="left", fontsize=10, color=_INK)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper right", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


if __name__ == "__main__":
    sys.exit(draw_stored("shapes", lambda config: [draw(config["runs"])]))
