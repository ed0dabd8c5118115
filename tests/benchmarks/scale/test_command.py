"""`python -m benchmarks.scale`: a planned step on many devices, simulated."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from benchmarks.scale.__main__ import main
from benchmarks.scale.command import parse_devices
from lightning_offload.errors import UnsupportedError
from lightning_offload.graph.catalog import device_spec
from tests.cli import running
from tests.cli.running import SMALL, option, rows_of
from tests.one_thread import one_thread as one_thread

ROW_KEYS = {
    "num_devices", "num_nodes", "effective_batch", "step_seconds", "samples_per_second", "efficiency",
    "exchange_seconds", "exposed_seconds", "algorithms",
}  # fmt: skip
SCALE = [*SMALL, "--budget", "2500000B"]
PARAMETER_BYTES = 4 * (3 * 8 * 9 + 8 * 8 * 9 * 2 + 8 * 3 + 8 * 6 + 8 * 32 * 32 * 10 + 10)

output_of, json_of, refused = (
    functools.partial(function, run=main) for function in (running.output_of, running.json_of, running.refused)
)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual terminal, which tables must fit on."""
    monkeypatch.setenv("COLUMNS", "80")


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It lists the options and the exit codes, where no option is given too."""
    monkeypatch.setenv("COLUMNS", "160")
    out = output_of(capsys, "--help")
    options = ("--devices", "--intra", "--inter", "--per-node", "--nics", "--algorithm", "--accumulate", "--no-overlap")
    assert all(word in out for word in (*options, "--bucket-size", "--budget", "--json", "2 bad input"))
    assert "Usage: python -m benchmarks.scale " in out
    assert output_of(capsys) == out


def test_from_one_to_1024(capsys: pytest.CaptureFixture[str]) -> None:
    """One device does what its plan says; each of more devices does no more than that."""
    found = json_of(capsys, *SCALE)
    one, *rows = found["scaling"]
    assert found["simulated"] is True
    assert [row["num_devices"] for row in (one, *rows)] == [2**power for power in range(11)]
    assert one.keys() == ROW_KEYS
    assert one["step_seconds"] == found["step_seconds"]
    assert (one["efficiency"], one["exposed_seconds"], one["algorithms"]) == (1.0, 0.0, [])
    assert all(0 < row["efficiency"] < 1 for row in rows)


def test_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The step of one device, with DDP's buckets in its peak: a plan of the same budget less the gradients."""
    found = json_of(capsys, *SCALE)
    assert found["gradient_bytes"] == found["parameter_bytes"] == PARAMETER_BYTES
    assert (found["num_buckets"], found["bucket_cap_bytes"]) == (1, 25 << 20)
    assert (found["predicted_peak_bytes"] <= 2_500_000, found["budget_bytes"]) == (True, 2_500_000)
    less = running.json_of(capsys, "plan", *SMALL, "--budget", f"{2_500_000 - PARAMETER_BYTES}B", "--output", "")
    assert found["predicted_peak_bytes"] == less["predicted_peak_bytes"] + PARAMETER_BYTES
    assert found["predicted_step_seconds"] == pytest.approx(less["predicted_step_seconds"])


def test_a_step_takes_as_long_as_its_launches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """5 us for each op: more than a small net's roofline at the peaks of its device."""
    peak = tmp_path / "peak.json"
    peak.write_text(device_spec("k40c").at_peak().to_json())
    found = json_of(capsys, *option("--device", str(peak)), "--budget", "2500000B", "--devices", "1")
    assert found["step_seconds"] == pytest.approx(5e-6 * found["num_ops"])
    assert found["step_seconds"] > found["predicted_step_seconds"]


def test_links(capsys: pytest.CaptureFixture[str]) -> None:
    """By default what machines with the device have; others by name or rate. Slower ones expose more."""
    usual = json_of(capsys, *SCALE)
    assert (usual["intra"]["name"], usual["inter"]["name"]) == ("pcie3", "10gbe")
    assert (usual["devices_per_node"], usual["nics_per_node"], usual["algorithm"]) == (8, 8, "auto")
    assert all(len(text) > 20 for text in usual["intra"]["sources"])
    named = json_of(capsys, *SCALE, "--intra", "NVLink 4", "--inter", "400Gbit/s", "--per-node", "4", "--nics", "1")
    assert (named["intra"]["name"], named["inter"]["bytes_per_second"]) == ("nvlink4", 50e9)
    assert (named["devices_per_node"], named["nics_per_node"]) == (4, 1)
    assert named["scaling"][3]["num_nodes"] == 2
    for slow, fast in zip(usual["scaling"][1:], named["scaling"][1:], strict=True):
        assert slow["exposed_seconds"] > fast["exposed_seconds"]


def test_how_gradients_are_exchanged(capsys: pytest.CaptureFixture[str]) -> None:
    """One bucket that is ready at the end is exposed as a whole, overlapped or not; smaller ones hide in part."""
    arguments = [*SCALE, "--devices", "1,8", "--intra", "100MB/s"]
    ring = json_of(capsys, *arguments, "--algorithm", "ring", "--no-overlap")
    row = ring["scaling"][1]
    assert row["exchange_seconds"] == pytest.approx(2 * 7 / 8 * PARAMETER_BYTES / 1e8 + 14 * 9.6e-6)
    assert row["exposed_seconds"] == pytest.approx(row["exchange_seconds"])
    assert (row["algorithms"], ring["overlap"]) == (["ring"], False)
    small = json_of(capsys, *arguments, "--algorithm", "ring", "--bucket-size", "100kB")
    assert small["num_buckets"] > 1
    assert small["scaling"][1]["exposed_seconds"] < row["exposed_seconds"]
    server = json_of(capsys, *arguments, "--algorithm", "server")
    assert server["scaling"][1]["exchange_seconds"] > 4 * row["exchange_seconds"]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """It says that it is simulated, and fits on a terminal with the figures of JSON."""
    out = output_of(capsys, *SCALE, "--intra", "nvlink4", "--inter", "ndr400", "--accumulate", "2")
    assert "tests.cli.models:small, batch 8 a device, float32 on Tesla K40c: simulated" in out
    assert "NVLink 4, 18 links, 370.8 GB/s a device, 8 devices" in out
    assert "after 2 micro-batches" in out
    assert "Simulated: equal devices without stragglers" in out
    rows = rows_of(out)
    assert [row[0] for row in rows] == ["1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1,024"]
    assert rows[0][3:] == ["100.00%", "-", "-"]
    assert rows[-1][1] == "16,384"
    assert all(len(line) <= 80 for line in out.splitlines() if "│" in line)


def test_how_is_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Which algorithm from how many devices on, and whether it overlaps."""
    out = output_of(capsys, *SCALE, "--inter", "ndr400")
    assert "Exchange: ring from 2 devices, tree from 16 devices; overlapping backward." in out
    out = output_of(capsys, *SCALE, "--devices", "1", "--no-overlap")
    assert "Exchange: nothing to exchange on one device; after backward, all at once." in out


def test_copies_share_the_link_to_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Said where a plan swaps and the exchange takes the same way; not without swaps."""
    swapping = output_of(capsys, *SCALE, "--policy", "all-swap")
    assert "the exchange waits for swaps where both go over the host's link" in swapping
    assert "contention" not in output_of(capsys, *SCALE, "--budget", "100MiB")


def test_numbers_of_devices(subtests: pytest.Subtests) -> None:
    """Dots go on by the ratio of the two before them."""
    for text, numbers in [
        ("1", (1,)), ("3,5,100", (3, 5, 100)),
        ("1,2,4,...,32", (1, 2, 4, 8, 16, 32)), ("8, 16, ..., 64", (8, 16, 32, 64)),
        ("1,10,...,1000,2000", (1, 10, 100, 1000, 2000)), ("1,2,...,8,24,...,216", (1, 2, 4, 8, 24, 72, 216)),
        ("1,2,...,4", (1, 2, 4)),
    ]:  # fmt: skip
        with subtests.test(text=text):
            assert parse_devices(text) == numbers


def test_what_is_no_list_of_numbers(subtests: pytest.Subtests) -> None:
    """Refused with what to write."""
    for text in [
        "", "0", "-1", "1,1", "4,2", "a", "1,...,8", "1,2,...", "...,4", "1,2,...,...,8", "1.5", "1,,2", "99999999999",
        "²",
    ]:  # fmt: skip
        with (
            subtests.test(text=text),
            pytest.raises(
                UnsupportedError, match=r"is no list of numbers: write 1,8,64 or 1,2,4,\.\.\.,1024, ascending"
            ),
        ):
            parse_devices(text)


@pytest.mark.parametrize("text", ["1,2,...,7", "2,3,...,9", "1,2,4,...,5"])
def test_dots_that_lead_elsewhere(text: str) -> None:
    """The last number has to follow too."""
    with pytest.raises(UnsupportedError, match="the dots do not lead to"):
        parse_devices(text)


def test_bad_input(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    """One line says what is allowed, before the model is looked for."""
    for arguments, message in [
        (["--devices", "none"], "--devices 'none' is no list of numbers"),
        (["--intra", "nvlink9"], "unknown interconnect 'nvlink9': did you mean 'nvlink"),
        (["--inter", "5Gb/s"], "interconnect '5Gb/s' is no rate"),
        (["--per-node", "0"], "--per-node 0 is not positive"),
        (["--nics", "0"], "--nics 0 is not positive"),
        (["--accumulate", "0"], "--accumulate 0 is not positive"),
        (["--algorithm", "star"], "unknown algorithm 'star': choose one of auto, ring, tree, binary-tree, server"),
        (["--bucket-size", "25M"], "--bucket-size: '25M' is ambiguous"),
        (["--bucket-size", "0"], "--bucket-size '0' holds nothing"),
        (["--bucket-size", "25"], "--bucket-size 25 is ambiguous, it may mean bytes or DDP's MiB: write 25B or 25MiB"),
    ]:
        with subtests.test(arguments=arguments):
            assert message in refused(capsys, "no.such:model", *arguments)


def test_the_same_bad_input_as_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Options that are shared are checked alike; a budget without a plan ends with code 3."""
    assert "unknown device 'abacus'" in refused(capsys, *option("--device", "abacus"))
    assert "infeasible" in refused(capsys, *SMALL, "--budget", "1MiB", code=3)
