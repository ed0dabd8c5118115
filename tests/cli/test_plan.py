"""``plan``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lightning_offload import MemoryPlugin, cli
from lightning_offload.cli.workload import Workload
from lightning_offload.graph.catalog import device_spec
from lightning_offload.graph.memory_plan import MemoryPlan
from lightning_offload.graph.step_graph import StepGraph
from tests.cli import models
from tests.cli.running import SMALL, json_of, option, output_of, refused

HEADER_KEYS = {
    "target", "inputs", "batch_size", "dtype", "precision", "loss", "chunked_loss", "accumulate", "optimizer", "device",
    "device_bytes",
}  # fmt: skip
PREDICTION_KEYS = {
    "policy", "graph_digest", "budget_bytes", "fits_plainly", "plain_peak_bytes", "predicted_peak_bytes",
    "floor_bytes", "floor_op", "plain_step_seconds", "predicted_step_seconds", "predicted_stall_seconds",
    "bound_seconds", "overhead", "gap_to_bound", "predicted_host_bytes", "predicted_disk_bytes",
}  # fmt: skip
BYTES_KEYS = {"keep_bytes", "swap_bytes", "recompute_bytes"}
STATE_KEYS = {"persistent_bytes", "parameter_bytes", "optimizer_bytes", "num_ops"}
PLAN_KEYS = (
    HEADER_KEYS | PREDICTION_KEYS | BYTES_KEYS | STATE_KEYS
    | {"capture_seconds", "planning_seconds", "storages", "plan_path", "graph_path", "report_path", "trace_path"}
)  # fmt: skip
OUTPUT = ("--output", "plan.json")
STORAGE_KEYS = {"storage", "module", "op", "num_bytes", "idle_seconds", "action", "tier"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands run in a folder of their own, on a wide terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def budget_between(capsys: pytest.CaptureFixture[str], share: float) -> str:
    """A budget at a share of the way from the floor to the plain peak of the small step."""
    found = json_of(capsys, "plan", *SMALL, "--output", "")
    return f"{int(found['floor_bytes'] + share * (found['plain_peak_bytes'] - found['floor_bytes']))}B"


def test_a_step_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a budget all of the device's memory is one; what is kept is kept, and the plan and step are written."""
    out = output_of(capsys, "plan", *SMALL, *OUTPUT)
    assert "tests.cli.models:small, batch 8, float32 on Tesla K40c: fits 11.2 GiB as it is" in out
    assert "persistent state" in out
    assert "The 10 storages that would cost most to keep" in out
    assert "Wrote plan.json (plan for MemoryPlugin(plan=...)), plan.graph.json (its step)." in out
    plan = MemoryPlan.from_json(Path("plan.json").read_text())
    plan.check(StepGraph.from_json(Path("plan.graph.json").read_text()))
    assert plan.decisions == ()
    assert plan.budget_bytes == device_spec("k40c").memory_bytes


def test_the_budget_is_echoed_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """In the first line and in the table; in an error and by explain as a round number reads."""
    out = output_of(capsys, "plan", *SMALL, "--budget", "2.5 MB", *OUTPUT)
    assert "on Tesla K40c: fits 2.5 MB (2.4 MiB) at" in out
    assert re.search(r"budget +2\.5 MB \(2\.4 MiB\) *\n", out)
    assert "fits 2.5MB (2.4 MiB) at" in output_of(capsys, "explain", "plan.json")
    assert "fits 4MiB as it is" in output_of(capsys, "plan", *SMALL, "--budget", "4MiB")
    assert "fits 0.5 of the device (5.6 GiB) as it is" in output_of(capsys, "plan", *SMALL, "--budget", "0.5")
    assert "budget 500kB (488.3 KiB, 500000 bytes) is infeasible" in (
        refused(capsys, "plan", *SMALL, "--budget", "500kB", code=3)
    )


def test_json_has_the_same_keys_always(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures in bytes and seconds, which agree with the written plan and with one another."""
    budget = budget_between(capsys, 0.5)
    found = json_of(capsys, "plan", *SMALL, "--budget", budget, *OUTPUT)
    assert set(found) == PLAN_KEYS
    assert len(found["storages"]) == 10
    assert all(set(entry) == STORAGE_KEYS for entry in found["storages"])
    plan = MemoryPlan.from_json(Path(found["plan_path"]).read_text())
    graph = StepGraph.from_json(Path(found["graph_path"]).read_text())
    assert (found["report_path"], found["trace_path"]) == (None, None)
    for action in ("keep", "swap", "recompute"):
        assert found[f"{action}_bytes"] == plan.bytes_of(graph, action)  # type: ignore[arg-type]
    assert found["predicted_peak_bytes"] == plan.predicted_peak_bytes <= plan.budget_bytes == int(budget[:-1])
    assert found["overhead"] == pytest.approx(plan.predicted_step_seconds / plan.plain_step_seconds - 1)
    assert found["swap_bytes"] + found["recompute_bytes"] > 0
    assert found["fits_plainly"] is False


def gradients(net: nn.Module, x: Tensor, scope: contextlib.AbstractContextManager[None]) -> list[Tensor]:
    """Gradients of a step within a scope."""
    net.zero_grad()
    with scope:
        net(x).sum().backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


def test_the_plan_is_for_the_real_step(capsys: pytest.CaptureFixture[str]) -> None:
    """MemoryPlugin takes the file for a real step on the CPU, runs under it, and gives the same gradients."""
    here = dataclasses.replace(device_spec("k40c"), name="this machine", kind="cpu", compute_capability=0)
    Path("here.json").write_text(here.to_json())
    budget = budget_between(capsys, 0.3)
    output_of(capsys, "plan", *option("--device", "here.json"), "--budget", budget, "--optimizer", "sgd", *OUTPUT)
    torch.manual_seed(3)
    plain = models.small()
    planned = copy.deepcopy(plain)
    batches = [torch.randn(8, 3, 32, 32) for _ in range(4)]
    expected = [gradients(plain, x, contextlib.nullcontext()) for x in batches]
    with MemoryPlugin("1GiB", plan="plan.json", module=planned) as memory:
        for x, wanted in zip(batches, expected, strict=True):
            found = gradients(planned, x, memory.step(x))
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        report = memory.report()
    assert report.phase == "planned"
    assert report.swapped_bytes + report.recomputed_bytes > 0
    assert report.num_mismatched == 0


def test_what_was_not_asked_for_is_not_written(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Nothing without a name, and how to get a plan is said; the step goes beside a plan, or where it is named."""
    out = output_of(capsys, "plan", *SMALL)
    assert "Wrote" not in out
    assert "The plan was not written: --output plan.json writes it" in out
    assert json_of(capsys, "plan", *SMALL, "--output", "")["plan_path"] is None
    assert list(folder.iterdir()) == []
    output_of(capsys, "plan", *SMALL, "--graph", "step.json")
    output_of(capsys, "plan", *SMALL, "--output", "only.json", "--graph", "")
    assert sorted(path.name for path in folder.iterdir()) == ["only.json", "step.json"]
    assert "not written" not in output_of(capsys, "plan", *SMALL, *OUTPUT)
    assert Path("plan.graph.json").is_file()


def test_report_and_trace(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made from the same step, plan and device."""
    report = pytest.importorskip("lightning_offload.report")
    made = []
    for name in ("save_plan_html", "save_plan_trace"):
        monkeypatch.setattr(report, name, lambda path, graph, plan, device: made.append((path, graph, plan, device)))
    output_of(capsys, "plan", *SMALL, "--report", "r.html", "--trace", "t.json", *OUTPUT)
    (page, *rest), (trace, *same) = made
    assert (page, trace) == (Path("r.html"), Path("t.json"))
    assert rest == same
    assert rest[0] == StepGraph.from_json(Path("plan.graph.json").read_text())
    assert rest[1] == MemoryPlan.from_json(Path("plan.json").read_text())
    assert rest[2] == device_spec("k40c")


def test_a_report_that_cannot_be_made_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its extension and what draws it are checked before anything is captured."""
    monkeypatch.setattr(Workload, "capture", lambda *_: pytest.fail("the step was captured"))
    for arguments, message in [
        (("--report", "page.txt"), "'page.txt' must end in .html or .htm: write to 'page.html'"),
        (("--trace", "trace.html"), "'trace.html' must end in .json: write to 'trace.json'"),
    ]:
        assert message in refused(capsys, "plan", *SMALL, *arguments)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert "HTML reports need plotly: pip install" in refused(capsys, "plan", *SMALL, "--report", "page.html")


def test_kept_modules(capsys: pytest.CaptureFixture[str]) -> None:
    """What matches --keep is kept, whatever the policy."""
    arguments = ["plan", *SMALL, "--policy", "all-swap", "--keep", "4", "--keep", "7"]
    found = {entry["module"]: entry["action"] for entry in json_of(capsys, *arguments)["storages"]}
    assert found["4"] == found["7"] == "keep"
    assert "swap" in found.values()


def test_a_device_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A measured device is used as it stands, a host budget beside it."""
    Path("mine.json").write_text(device_spec("t4").to_json())
    found = json_of(capsys, "plan", *option("--device", "mine.json"), "--host-budget", "1MiB")
    assert (found["device"], found["device_bytes"]) == ("Tesla T4", device_spec("t4").memory_bytes)


def test_tf32_is_float32_but_for_its_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """The model stays as it is; the device has other shares for it."""
    plain, fast = (
        json_of(capsys, "plan", *option("--device", "a100"), "--dtype", dtype, "--output", "")
        for dtype in ("float32", "tf32")
    )
    assert (fast["dtype"], fast["plain_peak_bytes"]) == ("tf32", plain["plain_peak_bytes"])
    assert fast["plain_step_seconds"] != plain["plain_step_seconds"]


def test_more_than_the_device_has_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A budget above the device's memory is planned for, with a note."""
    assert cli.run(["plan", *SMALL, "--budget", "64GiB", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["budget_bytes"] == 64 << 30
    assert err == "lightning-offload: --budget 64GiB is more than Tesla K40c has, 11.2 GiB\n"


def test_an_infeasible_budget(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Exit code 3, one line with the smallest feasible budget; that budget works; nothing is written in between."""
    err = refused(capsys, "plan", *SMALL, "--budget", "1MiB", code=3)
    assert "budget 1.0 MiB (1048576 bytes) is infeasible: the smallest feasible budget is" in err
    assert list(folder.iterdir()) == []
    floor = err.split("feasible budget is")[1].split("(")[1].split(" bytes")[0]
    found = json_of(capsys, "plan", *SMALL, "--budget", f"{floor}B")
    assert found["floor_bytes"] == int(floor) >= found["predicted_peak_bytes"]


def test_bad_input(capsys: pytest.CaptureFixture[str], folder: Path, subtests: pytest.Subtests) -> None:
    """One line says what is wrong and what is allowed, the exit code is 2, and nothing is written."""
    for arguments, message in [
        (option("--device", "h20"), "unknown device 'h20': did you mean 'h200'? choose one of k40c"),
        (option("--device", "none.json"), "--device 'none.json' cannot be read"),
        (option("--batch-size", "0"), "--batch-size 0 is not positive"),
        (option("--batch-size", "many"), "Invalid value for '--batch-size': Input should be a valid integer"),
        (option("--input", "3x"), "--input '3x' has a dimension of no size"),
        (option("--input", "5x5"), "failed: RuntimeError"),
        (option("--input", "99999999999x99999999999"), "failed: "),
        ([*SMALL, "--budget", "12G"], "--budget: budget '12G' is ambiguous: write '12GiB'"),
        ([*SMALL, "--budget", "-3GB"], "--budget: "),
        ([*SMALL, "--budget", "7.5"], "--budget: budget 7.5 is a float outside (0, 1]"),
        ([*SMALL, "--budget", "0"], "--budget: budget 0 is not positive"),
        ([*SMALL, "--host-budget", "0.5"], "--host-budget '0.5' is no size of host memory: give bytes"),
        ([*SMALL, "--host-budget", "0"], "--host-budget '0' is no size of host memory: give bytes"),
        ([*SMALL, "--output", "."], "--output '.' is a folder"),
        ([*SMALL, "--output", "/"], "--output '/' is a folder"),
        ([*SMALL, "--output", 300 * "x"], "cannot be written: File name too long"),
        ([*SMALL, "--output", "p.json", "--graph", "p.json"], "--output and --graph would both be written to 'p.json'"),
        ([*SMALL, "--output", "p.json", "--trace", "p.graph.json"], "--graph and --trace would both be written to"),
        ([*SMALL, "--dtype", "int8"], "unknown dtype 'int8': choose one of float32, float16, bfloat16"),
        ([*SMALL, "--input-dtype", "string"], "--input-dtype 'string' is not known"),
        ([*SMALL, "--optimizer", "lion"], "--optimizer 'lion' is not known: choose one of none, sgd, momentum"),
        ([*SMALL, "--policy", "best"], "unknown policy 'best': choose one of 'auto'"),
        ([*SMALL, "--keep", "head*"], "--keep 'head*' matches no module that saves a tensor; there are '0', '1'"),
        ([*SMALL, "--output", "no/plan.json"], "--output 'no/plan.json' lies in 'no', which is no folder"),
        ([*SMALL, "--report", "."], "--report '.' is a folder"),
        (["tests.cli.models:small_", *SMALL[1:]], "has no attribute 'small_'; did you mean 'small'?"),
        (["tests.cli.model:small", *SMALL[1:]], "there is no module 'tests.cli.model' in"),
        (["small", *SMALL[1:]], "model 'small' is not understood: write MODULE:ATTRIBUTE"),
        (SMALL[:1] + SMALL[3:], "--input is missing"),
        ([], "Missing argument 'MODULE:ATTRIBUTE'"),
        ([*SMALL, "--bugdet", "1GiB"], "No such option: --bugdet"),
    ]:
        with subtests.test(arguments=arguments):
            assert message in refused(capsys, "plan", *arguments)
            assert list(folder.iterdir()) == []


def test_no_device_and_none_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --device the GPU of this machine is meant; where there is none, the choices are listed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = [*SMALL[:5]]
    assert "this machine has no GPU to plan for: give --device, one of k40c, m40" in refused(capsys, "plan", *arguments)


class Properties:
    def __init__(self, name: str) -> None:
        self.name = name
        self.total_memory = 80 << 30


def test_the_gpu_of_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found in the catalogue by its name, with the memory that it has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties("NVIDIA A100-SXM4-80GB"))
    found = json_of(capsys, "plan", *SMALL[:5])
    assert (found["device"], found["device_bytes"]) == ("NVIDIA A100-SXM4-80GB", 80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties("Radeon"))
    assert "this machine's 'Radeon' is not in the catalogue" in refused(capsys, "plan", *SMALL[:5])


# ---- explain
