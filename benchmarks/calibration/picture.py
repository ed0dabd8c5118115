"""Predicted against public step times, the picture of docs/calibration.md.

`python -m benchmarks.calibration.picture` draws that of the stored result; it needs matplotlib.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from benchmarks.calibration.checking import CLOSE
from benchmarks.results import draw_stored
from lightning_offload.errors import UnsupportedError

__all__ = ["PICTURE", "draw"]

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "calibration.png"

_INK, _FAINT = "#1f2937", "#9ca3af"
_COLORS = {"float32": "#059669", "tf32": "#d97706", "amp": "#2563eb"}
_NAMES = {"float32": "float32", "tf32": "TF32", "amp": "half precision"}
_PANELS = (("peak_seconds", "at the peaks of the datasheet"), ("seconds", "calibrated"))


def draw(checked: list[dict[str, Any]], path: Path = PICTURE) -> Path:
    """Draw a panel of predictions at the peaks and one of calibrated ones.

    Args:
        checked: The measurements with their predictions, as the stored result has them.
        path: Where to.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError("the picture needs matplotlib: pip install matplotlib") from error
    figure = figure_module.Figure(figsize=(11, 5.4), layout="constrained")
    limits = (0.02, 4.0)
    for panel, (key, title) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        panel.fill_between(
            limits, [(1 - CLOSE) * x for x in limits], [(1 + CLOSE) * x for x in limits], color=_FAINT, alpha=0.25, lw=0
        )
        panel.plot(limits, limits, color=_FAINT, lw=1)
        for precision, color in _COLORS.items():
            for is_held in (False, True):
                chosen = [c for c in checked if c["row"]["precision"] == precision and c["held"] is is_held]
                panel.scatter(
                    [c["row"]["seconds"] for c in chosen], [c[key] for c in chosen], s=34, alpha=0.85, lw=1.3,
                    edgecolors=color, facecolors=color if is_held else "none",
                    label=f"{_NAMES[precision]}, {'held out' if is_held else 'fitted'}",
                )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlim=limits, ylim=limits)
        panel.set(xlabel="public step time, s", ylabel="predicted step time, s")
        panel.set_title(title, loc="left", fontsize=11, color=_INK)
        panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, loc="upper left", fontsize=9, title="the band is 25% either way")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=144)
    return path


if __name__ == "__main__":
    sys.exit(draw_stored("calibration", lambda config: [draw(config["checked"])]))
