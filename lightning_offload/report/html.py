"""What HTML reports are made of: one file with everything in it, which needs no network.

plotly.js comes with the package of that name, which the extra "report" installs. Whatever is the user's (module names,
device and policy names) is escaped; the page's own policy forbids it to load anything.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources

from lightning_offload._version import __version__
from lightning_offload.errors import UnsupportedError
from lightning_offload.report.scale import escape
from lightning_offload.report.timeline_plots import Plot

__all__ = ["cell", "make_page", "page_part", "plot_place", "plotly_script", "plots_json", "section", "table"]


def plotly_script() -> str:
    """The whole of plotly.js.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UnsupportedError("HTML reports need plotly: pip install 'lightning-offload[report]'") from error
    script: str = get_plotlyjs()
    return script


def make_page(
    script: str, *, topic: str, title: str, lead: str, plots: Mapping[str, Plot], body: str, footer: str
) -> str:
    """Make a page of a body and its plots.

    Args:
        script: That of :func:`plotly_script`.
        topic: What it is about, above the title.
        title: In the page, and of it.
        lead: What it says, in a sentence.
        plots: By name, as plotly.js reads them; those that the page's script knows by name zoom together.
        body: HTML: of :func:`section`, with a :func:`plot_place` for each plot.
        footer: Where it comes from.
    """
    parts = {
        "version": escape(__version__),
        "topic": escape(topic),
        "title": escape(title),
        "heading": escape(title),
        "lead": escape(lead),
        "css": page_part("page.css"),
        "js": page_part("page.js"),
        "plotly": script,
        "plots": plots_json(plots),
        "body": body,
        "footer": escape(footer),
    }
    # each part is put in its place once: what is in a part is left as it is
    pieces = page_part("page.html").split("@@")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def page_part(name: str) -> str:
    """The text of a file of the page."""
    return (resources.files("lightning_offload.report") / name).read_text(encoding="utf-8")


def plots_json(plots: Mapping[str, Plot]) -> str:
    """JSON that cannot end the script that it stands in."""
    text = json.dumps(plots, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def section(title: str, text: str, *parts: str) -> str:
    """A section of a body: its title and text, which are escaped, and what it shows, which is HTML."""
    return f"<section>\n<h2>{escape(title)}</h2>\n<p>{escape(text)}</p>\n" + "\n".join(parts) + "\n</section>"


def plot_place(name: str, label: str, plots: Mapping[str, Plot]) -> str:
    """Where a plot goes; the label is for those who cannot see it."""
    height = plots[name]["layout"]["height"]
    return (
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(label)}" style="height:{height}px"></div>'
    )


def table(
    columns: Sequence[str], rows: Iterable[Iterable[str]], right: Collection[int] = (), *, stacks: bool = False
) -> str:
    """A table of cells that are HTML; one that stacks has those of a row below each other on a narrow screen."""
    head = "".join(
        f'<th scope="col"{" class=number" if i in right else ""}>{escape(name)}</th>' for i, name in enumerate(columns)
    )
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    name = ' class="stacks"' if stacks else ""
    return f'<div class="scroll"><table{name}><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'


def cell(text: str) -> str:
    """A cell of a table."""
    return f"<td>{escape(text)}</td>"
