"""The HTML report in a real browser, where there is one."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lightning_offload.report import MeasuredStep, PolicyOutcome, save_plan_html
from tests.report.steps import CARD, MIXED, SIX, net, plan_of

pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NAMES = ("memory", "lanes", "modules", "measured", "policies")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium or Chrome: apt-get install chromium")


def visit(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page in a fresh headless browser: what it made of it, and the messages on its console."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
            "--enable-logging=stderr", "--virtual-time-budget=20000", "--window-size=1200,900", *options,
            "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A page with all of its plots."""
    path = tmp_path / "plan.html"
    outcomes = [
        PolicyOutcome(policy="auto", step_seconds=13.0, plain_step_seconds=12.0, peak_bytes=500),
        PolicyOutcome(policy="keep-all", floor_bytes=800),
    ]
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    save_plan_html(path, SIX, plan, CARD, measured=MeasuredStep(step_seconds=15.0), comparison=outcomes)
    return path


def test_every_plot_is_drawn_without_an_error(page: Path, tmp_path: Path) -> None:
    """Each place has its drawing with bars or curves in it, and the console stays empty."""
    dom, console = visit(page, tmp_path / "profile")
    assert console == []
    assert 'data-ready="true"' in dom
    places = re.split(r'id="plot-', dom)[1:]
    assert sorted(place.partition('"')[0] for place in places) == sorted(NAMES)
    for place in places:
        assert 'class="main-svg"' in place
        assert len(re.findall(r'class="(?:point|js-line)"', place)) >= 2
    assert "budget 600 B" in dom


def test_colours_follow_the_readers_theme(page: Path, tmp_path: Path) -> None:
    """The line under the plan has the light theme's blue, or the dark one's."""
    colors = []
    for scheme in ("1", "0"):
        dom, console = visit(page, tmp_path / f"profile{scheme}", f"--blink-settings=preferredColorScheme={scheme}")
        assert console == []
        colors.append(set(re.findall(r"stroke: (rgb\([^)]*\))", dom)))
    assert "rgb(47, 115, 183)" in colors[0] - colors[1]
    assert "rgb(91, 159, 224)" in colors[1] - colors[0]


@pytest.mark.parametrize(("from_", "to"), [("memory", "lanes"), ("lanes", "memory")])
def test_plots_over_time_zoom_together(page: Path, tmp_path: Path, from_: str, to: str) -> None:
    """What is zoomed in one is zoomed in the other, and going back goes back in both."""
    ready = 'root.dataset.ready = "true";'
    script = f"""{ready}
    const range = () => document.getElementById("plot-{to}").layout.xaxis.range.join("-");
    root.dataset.before = range();
    Plotly.relayout("plot-{from_}", {{"xaxis.range": [2, 4]}})
      .then(() => {{ root.dataset.zoomed = range(); }})
      .then(() => Plotly.relayout("plot-{from_}", {{"xaxis.autorange": true}}))
      .then(() => new Promise((done) => setTimeout(done, 100)))
      .then(() => {{ root.dataset.after = range(); }});
    """
    text = page.read_text(encoding="utf-8")
    assert text.count(ready) == 1
    page.write_text(text.replace(ready, script), encoding="utf-8")
    dom, console = visit(page, tmp_path / "profile")
    assert console == []
    found = dict(re.findall(r'data-(before|zoomed|after)="([^"]*)"', dom))
    assert found["zoomed"] == "2-4"
    assert found["before"] == found["after"] != "2-4"


OVERFLOW = """
    const wide = (part) => part.getBoundingClientRect().right > root.clientWidth + 0.5;
    const cut = (part) => {
      const [inner, outer] = [part, part.closest(".plot")].map((each) => each.getBoundingClientRect());
      return inner.left < outer.left - 0.5 || inner.right > outer.right + 0.5;
    };
    const found = (parts, is) => [...parts].filter(is).map((part) => part.textContent.slice(0, 30)).join("|");
    const data = {
      screen: root.clientWidth, page: root.scrollWidth, tables: found(document.querySelectorAll("td, dd"), wide),
      labels: found(document.querySelectorAll(".plot text"), cut),
    };
    parent.postMessage(JSON.stringify(data), "*");
"""
FRAME = """<iframe src="{page}" style="border:0;width:{width}px;height:900px"></iframe>
<script>onmessage = (message) => {{ document.documentElement.dataset.found = btoa(message.data); }}</script>"""


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_nothing_is_cut_off_at_the_side(width: int, tmp_path: Path) -> None:
    """From a phone's width up: neither page nor tables are wider than the screen, nor labels than their plot."""
    modules = [f"transformer.layers.{i}.self_attention.projection" for i in range(9)]
    graph = net(*modules)
    outcomes = [
        PolicyOutcome(policy="checkpoint-sqrt", step_seconds=53.0, plain_step_seconds=18.0, peak_bytes=500),
        PolicyOutcome(policy="superneurons", floor_bytes=123_456_789_012),
    ]
    plan = plan_of(graph, {1: "swap", 3: "recompute"}, budget_bytes=900)
    path, frame = tmp_path / "plan.html", tmp_path / "frame.html"
    save_plan_html(path, graph, plan, CARD, measured=MeasuredStep(step_seconds=15.0), comparison=outcomes)
    text, ready = path.read_text(encoding="utf-8"), 'root.dataset.ready = "true";'
    path.write_text(text.replace(ready, ready + OVERFLOW), encoding="utf-8")
    frame.write_text(FRAME.format(page=path.as_uri(), width=width), encoding="utf-8")  # windows have a least width
    dom, console = visit(frame, tmp_path / "profile", "--window-size=1500,1000", "--hide-scrollbars")
    assert console == []
    (encoded,) = re.findall(r'data-found="([^"]*)"', dom)
    assert json.loads(base64.b64decode(encoded)) == {"screen": width, "page": width, "tables": "", "labels": ""}


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """A module named like markup is text in the plots and in the tables, and is neither read as markup nor mangled."""
    path = tmp_path / "plan.html"
    graph = net("<b>&amp;x</b>", "<i onload=alert(1)>")
    save_plan_html(path, graph, plan_of(graph, {}), CARD)
    dom, console = visit(path, tmp_path / "profile")
    assert console == []
    shown = dom.partition('id="plot-modules"')[2]
    labels = re.findall(r'class="ytick"><text[^>]*>(.*?)</text>', shown)
    assert labels == ["&lt;b&gt;&amp;amp;x&lt;/b&gt;", "&lt;i onload=alert(1)&gt;"]
    assert "<code>&lt;b&gt;&amp;amp;x&lt;/b&gt;</code>" in shown


def test_errors_would_be_seen(page: Path, tmp_path: Path) -> None:
    """A page whose script fails leaves a message on the console, so an empty console means something."""
    page.write_text(page.read_text(encoding="utf-8").replace("Plotly.react(", "Plotly.nosuch("), encoding="utf-8")
    dom, console = visit(page, tmp_path / "profile")
    assert console
    assert 'data-ready="true"' not in dom
