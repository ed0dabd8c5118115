"""The HTML report as a file: complete, self-contained, escaped, light."""

from __future__ import annotations

import builtins
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lightning_offload.errors import PlanError, ReportFileError, UnsupportedError
from lightning_offload.report import MeasuredStep, PolicyOutcome, save_plan_html
from lightning_offload.report.html import plots_json
from lightning_offload.report.page import _body
from lightning_offload.report.plan_view import view_plan
from tests.report.steps import CARD, MIXED, SIX, net, plan_of, plots_of

pytest.importorskip("plotly", reason="plotly, the extra 'report', is not installed")

MEASURED = MeasuredStep(step_seconds=15.0, peak_bytes=700, backward_peak_bytes=700)
COMPARISON = (
    PolicyOutcome(policy="auto", step_seconds=13.0, plain_step_seconds=12.0, peak_bytes=500),
    PolicyOutcome(policy="keep-all", floor_bytes=800),
)


class _Text(HTMLParser):
    """The text of a page and its tags, scripts and styles aside."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)


def read(page: str) -> tuple[str, list[tuple[str, dict[str, str | None]]]]:
    parser = _Text()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return " ".join(" ".join(parser.texts).split()), parser.tags


def body(**options: Any) -> str:
    view = view_plan(SIX, plan_of(SIX, MIXED, budget_bytes=600), CARD, **options)
    plots = {name: {"layout": {"height": 1}} for name in ("memory", "lanes", "modules", "measured", "policies")}
    return read(_body(view, plots))[0]


def test_page_is_whole_and_loads_nothing(tmp_path: Path) -> None:
    """Well-formed, with plotly.js in it, no address to load from, and a policy that would forbid it."""
    page = tmp_path / "plan.html"
    save_plan_html(page, SIX, plan_of(SIX, MIXED), CARD, measured=MEASURED, comparison=COMPARISON)
    text, tags = read(page.read_text(encoding="utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    assert not [tag for tag, attributes in tags if {"src", "href"} & set(attributes)]
    policy = next(a["content"] for t, a in tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "@@" not in text
    places = {a["id"] for t, a in tags if t == "div" and (a.get("id") or "").startswith("plot-")}
    assert places == {f"plot-{name}" for name in plots_of(page)}
    assert places == {"plot-memory", "plot-lanes", "plot-modules", "plot-measured", "plot-policies"}
    assert all(a.get("aria-label") for t, a in tags if t == "div" and (a.get("id") or "").startswith("plot-"))


def test_sections_without_data_are_left_out(tmp_path: Path) -> None:
    """Nothing measured, nothing compared, nothing saved."""
    page = tmp_path / "plan.html"
    save_plan_html(page, SIX, plan_of(SIX, {}), CARD)
    assert set(plots_of(page)) == {"memory", "lanes", "modules"}
    save_plan_html(page, SIX, plan_of(SIX, {}), CARD, measured=MeasuredStep(), comparison=())
    assert set(plots_of(page)) == {"memory", "lanes", "modules"}


def test_key_figures_stand_in_words() -> None:
    """Budget, peaks, floor, times and shares of the six-module net, whose plain step takes 12 s."""
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    text = body()
    for expected in (
        "budget 600 B", f"predicted peak {plan.predicted_peak_bytes} B", f"everything kept {plan.plain_peak_bytes} B",
        f"floor {plan.floor_bytes} B set by", "12.00 s with everything kept", "kept 200 B (33%)",
        "swapped 200 B (33%)", "recomputed 200 B (33%)", "saved by autograd: 600 B in 6 storages", "swapped to host",
        "body.0.conv",
    ):  # fmt: skip
        assert expected in text, expected


def test_measured_figures_stand_beside_predicted_ones() -> None:
    """With the difference; what was not measured is said to be unknown."""
    plan = plan_of(SIX, MIXED, budget_bytes=600)
    text = body(measured=MEASURED)
    assert f"predicted peak {plan.predicted_peak_bytes} B last measured: 700 B" in text
    assert "last measured: 15.00 s" in text
    share = 100 * (700 / plan.predicted_peak_bytes - 1)
    assert f"peak of the step {plan.predicted_peak_bytes} B 700 B {share:+.1f}%" in text
    assert re.search(r"forward peak \d+ B n/a n/a", text)


def test_the_engine_is_a_figure_of_steps_that_ran() -> None:
    """With the reason where it is Python; a plan alone has none."""
    assert "engine" not in body(measured=MEASURED)
    assert "engine native" in body(measured=dataclasses.replace(MEASURED, engine="native"))
    text = body(measured=dataclasses.replace(MEASURED, engine="python: no C++ compiler was found"))
    assert "engine python no C++ compiler was found" in text


def test_peak_over_the_budget_is_marked() -> None:
    """In the heading's sentence, and by colour."""
    plan = dataclasses.replace(plan_of(SIX, {}), budget_bytes=300)
    view = view_plan(SIX, plan, CARD)
    page = _body(view, {name: {"layout": {"height": 1}} for name in ("memory", "lanes")})
    assert f"over the budget by {view.planned.peak_bytes - 300} B" in page
    assert page.count("value over") == 1


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    """Module, device and policy names with tags, quotes and the page's own marks show as they are and run nothing."""
    evil = "</script><script>alert(1)</script><b x='\"'>@@css@@\u2028"
    graph = net(evil, evil + ".a", evil + ".b")
    device = dataclasses.replace(CARD, name=evil)
    page = tmp_path / "plan.html"
    outcome = PolicyOutcome(policy=evil, step_seconds=1.0, plain_step_seconds=1.0, peak_bytes=1)
    save_plan_html(page, graph, plan_of(graph, {1: "swap"}, policy=evil), device, comparison=[outcome])
    content = page.read_text(encoding="utf-8")
    text, tags = read(content)
    assert "alert(1)" in text
    assert [tag for tag, _ in tags].count("script") == 3
    assert not [tag for tag, _ in tags if tag == "b"]
    assert "\u2028" not in content
    assert "@@css@@" in text
    labels = plots_of(page)["modules"]["layout"]["yaxis"]["ticktext"]
    assert not [label for label in labels if "<" in label]


def test_json_cannot_end_its_script() -> None:
    """Whatever is in it, and it reads back as it was."""
    plots: dict[str, Any] = {"</script>": {"a": "<!-- \u2028 é"}}
    text = plots_json(plots)
    assert not {"<", "\u2028"} & set(text)
    assert json.loads(text) == plots


def test_long_steps_stay_light(tmp_path: Path) -> None:
    """Ten thousand ops: below 6 MB, most of them plotly.js, and the highest points of the curves are there."""
    graph = net(
        *(f"blocks.{i}.some.rather.long.module.name.of.a.layer" for i in range(5000)), size=1 << 20, seconds=1e-3
    )
    plan = plan_of(graph, dict.fromkeys(range(1, 5001, 2), "swap"), dataclasses.replace(CARD, d2h_bytes_per_second=1e9))
    page = tmp_path / "plan.html"
    save_plan_html(page, graph, plan, CARD)
    plots = plots_of(page)
    assert page.stat().st_size < 6_000_000
    plain, planned, *_ = plots["memory"]["data"]
    assert len(plain["x"]) == len(plain["y"]) == len(plain["text"]) < 2100
    assert max(plain["y"]) == pytest.approx(plan.plain_peak_bytes / 2**30, abs=1e-3)
    assert max(planned["y"]) == pytest.approx(plan.predicted_peak_bytes / 2**30, abs=1e-3)
    assert sum(len(bars["x"]) for bars in plots["lanes"]["data"]) < 4100
    assert len(plots["modules"]["layout"]["yaxis"]["ticktext"]) <= 24


def test_missing_plotly_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves no file."""
    real = builtins.__import__

    def without_plotly(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("plotly"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    with pytest.raises(UnsupportedError, match=r"pip install 'lightning-offload\[report\]'"):
        save_plan_html(tmp_path / "plan.html", SIX, plan_of(SIX, {}), CARD)
    assert list(tmp_path.iterdir()) == []


def test_bad_path_and_bad_plan_leave_no_file(tmp_path: Path) -> None:
    """Errors come before anything is written."""
    with pytest.raises(ReportFileError, match="must end in"):
        save_plan_html(tmp_path / "plan.json", SIX, plan_of(SIX, {}), CARD)
    with pytest.raises(PlanError, match="another model"):
        save_plan_html(tmp_path / "plan.html", net("a"), plan_of(SIX, {}), CARD)
    assert list(tmp_path.iterdir()) == []
