"""Builds the emulated device and runs tests on it: `make test-emulated`, `make test-emulated-all`, `make rehearse-gpu`.

python -m tests.emulated_cuda             # a share of them, chosen to reach every path, under each schedule
python -m tests.emulated_cuda --all       # all of them under each schedule, and the table of mutants: hours
python -m tests.emulated_cuda --rehearse  # what is to be run on a GPU: `make test-gpu`, `make bench-gpu` (tiny)

Each schedule is a pytest of its own with a time limit, two at a time. What a failed one said is shown, and the command
that runs it again. Where the device cannot be built, one line says why and nothing fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulated_cuda.build import build, why_not

CHECKOUT = Path(__file__).resolve().parents[2]
GPU, HERE = "tests/gpu", "tests/emulated_cuda"
LANES = f"{GPU}/test_native_lanes.py"
EXACT_TESTS = f"{GPU}/test_exact.py"
SHARE_SECONDS, ALL_SECONDS = 1200, 6 * 3600

LAZY = {"EMULATED_CUDA_MODE": "lazy", "EMULATED_CUDA_POLICY": "random", "EMULATED_CUDA_SEED": "1"}
COPIES_LAST = {**LAZY, "EMULATED_CUDA_POLICY": "copies_last"}
THREADS = {"EMULATED_CUDA_MODE": "threads", "EMULATED_CUDA_COMPUTE_US": "100", "EMULATED_CUDA_COPY_US": "300"}
EAGER = {"EMULATED_CUDA_MODE": "eager"}
WORKSPACES = {**EAGER, "EMULATED_CUDA_WORKSPACE_BYTES": str(32 << 20)}
TWO_DEVICES = {**LAZY, "EMULATED_CUDA_SEED": "2", "EMULATED_CUDA_DEVICES": "2"}

EXACT = (
    "test_same_bits and (inplace-residual or views-of-one-storage-all or custom-function-in-place-h or dropout-all"
    " or gan-in-one-step-all or accumulation-all or changing-shapes-all or gradient-penalty-all or own-hooks-all"
    " or checkpoint-selective-all or own-generator-all or retain-graph-all or resnet-bf16-h or lstm-all-recompute"
    " or overwritten-data or slice-of-storage)"
)
WHOLE = "test_devices or test_plain_steps or test_default_budget"
STRUCTURES = "changing_structures and 0.45 and (drop or regularised)"
SHAPES = "changing_shapes and images and 0.4"
GIVEN = "given_plans and logs"
SETTINGS = "half_precision and 0.25 or another_thread or accumulation_under_autocast or losses_in_chunks"


PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "tests.emulated_cuda.plugin", "-o", "timeout_method=thread")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One pytest, or another module.

    Attributes:
        name: What is shown of it.
        schedule: The emulated device's settings.
        tests: Files and folders.
        only: Which of their tests, as pytest's -k has it; all of them if empty.
        module: What runs them.
        options: What it is given before the tests.
    """

    name: str
    schedule: Mapping[str, str]
    tests: tuple[str, ...] = ()
    only: str = ""
    module: str = "pytest"
    options: tuple[str, ...] = PYTEST_OPTIONS

    @property
    def command(self) -> list[str]:
        """What runs them, in this interpreter."""
        return [
            sys.executable,
            "-m",
            self.module,
            *self.options,
            *self.tests,
            *(["-k", self.only] if self.only else []),
        ]


SHARE = (  # the longest first
    Run(
        name="threads: bits, memory, settings",
        schedule=THREADS,
        tests=(EXACT_TESTS, f"{GPU}/test_memory.py", f"{GPU}/test_out_of_memory.py", f"{GPU}/test_races.py", LANES),
        only=(
            "test_same_bits and (inplace-residual-all or lstm-all-swap or dropout-all) or plain_peak and resnet50 "
            "or within_the_budget and resnet50 and 0.25 or step_given_as_a_function or same_to_the_byte and all-swap "
            "or replays_are_compared or small_tensors or another_stream or native_lanes "
            "or (out+in+compute or read_by_nobody) and (accumulation or custom-function)"
        ),
    ),
    Run(
        name="lazy, copies last: races, mutants",
        schedule=COPIES_LAST,
        tests=(f"{GPU}/test_races.py", LANES, HERE),
        only=(
            "not other_settings and not gives_the_same_bits and not every_case and (emulated_cuda or does_not_wait"
            " or is_timed or another_stream or native_lanes"
            " or (out+in+compute or read_by_nobody) and (dropout or inplace-residual or views))"
        ),
    ),
    Run(
        name="lazy, random: bits, settings",
        schedule=LAZY,
        tests=(
            EXACT_TESTS,
            f"{GPU}/test_settings.py",
            f"{GPU}/test_devices.py",
            f"{GPU}/test_plain_steps.py",
            f"{GPU}/test_structures.py",
            f"{GPU}/test_shapes.py",
            f"{GPU}/test_given_plans.py",
            f"{GPU}/test_tuner.py",
        ),
        only=f"({EXACT}) or {SETTINGS} or {WHOLE} or {STRUCTURES} or {SHAPES} or {GIVEN} or test_tuner",
    ),
    Run(
        name="two devices, lazy, random",
        schedule=TWO_DEVICES,
        tests=(f"{GPU}/test_settings.py", f"{GPU}/test_devices.py", LANES, HERE),
        only=(
            "two_devices and dropout or of_the_users and (dropout or inplace-residual) or test_device or current_device"
            " or native_lanes"
        ),
    ),
    Run(
        name="eager, with cuBLAS's workspaces: plain steps, structures, memory given back",
        schedule=WORKSPACES,
        tests=(f"{GPU}/test_plain_steps.py", f"{GPU}/test_structures.py", f"{GPU}/test_races.py"),
        only=(
            "test_plain_steps or changing_structures and turns or read_by_nobody and (accumulation or custom-function)"
        ),
    ),
)

BENCHMARK = Run(
    name="eager: all cases of the benchmark, tiny",
    schedule=EAGER,
    tests=(f"{HERE}/test_benchmark.py",),
    only="every_case",
)
REHEARSAL = (
    Run(name="eager: make test-gpu", schedule=EAGER, tests=(GPU,), options=(*PYTEST_OPTIONS, "-m", "gpu")),
    BENCHMARK,
)

_EVERYTHING = (  # the longest first
    EXACT_TESTS,
    HERE,
    *(
        path
        for path in sorted(f"{GPU}/{file.name}" for file in (CHECKOUT / GPU).glob("test_*.py"))
        if path != EXACT_TESTS
    ),
)
_SCHEDULES = {
    "lazy, random": LAZY,
    "lazy, copies last": COPIES_LAST,
    "lazy, copies first": {**LAZY, "EMULATED_CUDA_POLICY": "copies_first"},
    "threads": THREADS,
    "two devices": TWO_DEVICES,
}
ALL = (
    Run(name="all mutants", schedule=LAZY, module="tests.emulated_cuda.mutants", options=()),
    BENCHMARK,
    *(
        Run(name=f"{name}: {tests}", schedule=schedule, tests=(tests,), only="not every_case")
        for name, schedule in _SCHEDULES.items()
        for tests in _EVERYTHING
        if not (schedule is TWO_DEVICES and tests == EXACT_TESTS)  # which know of one device: "lazy, random" again
    ),
)


_RUNNING: set[subprocess.Popen[str]] = set()


def main() -> None:
    """Build, run and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--all", action="store_true", help="all tests under each schedule, and all mutants")
    group.add_argument("--rehearse", action="store_true", help="make test-gpu, and all cases of make bench-gpu, tiny")
    parser.add_argument("--only", default="", help="the runs whose names contain this")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args()
    reason = why_not()
    if reason is not None:
        _say(f"emulated device: skipped, {reason}")
        return
    start = time.monotonic()
    folder = build(options.jobs)
    _say(f"emulated device: {folder} ({time.monotonic() - start:.0f} s)")
    chosen = ALL if options.all else REHEARSAL if options.rehearse else SHARE
    runs = [run for run in chosen if options.only in run.name]
    limit_seconds = SHARE_SECONDS if chosen is SHARE else ALL_SECONDS
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            passed = list(pool.map(lambda run: perform(run, folder, limit_seconds), runs))
        finally:  # also if this process is interrupted
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_RUNNING):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    sys.exit(not all(passed))


def perform(run: Run, folder: Path, limit_seconds: float) -> bool:
    """Run some tests, say how it went, and whether all is well."""
    added = {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "LIGHTNING_OFFLOAD_CACHE": "",
        "EMULATED_CUDA": "1",
        **run.schedule,
    }
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EMULATED_CUDA")}
    path = os.pathsep.join([str(folder), str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
    start = time.monotonic()
    # A session of its own, so that what the tests start ends with them.
    process = subprocess.Popen(
        run.command,
        cwd=CHECKOUT,
        env={**inherited, **added, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    _RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=limit_seconds)
        told = _summary(output)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        told = f"ended after {limit_seconds:.0f} s"
    finally:
        _RUNNING.discard(process)
    is_well = process.returncode == 0
    line = f"{'ok    ' if is_well else 'FAILED'} {run.name}: {told} ({time.monotonic() - start:.0f} s)"
    if not is_well:
        settings = [f"{name}={shlex.quote(value)}" for name, value in added.items()]
        settings.append(f"PYTHONPATH={shlex.quote(f'{folder}{os.pathsep}{CHECKOUT}')}")
        line = f"{output}\n{' '.join(settings)} {shlex.join(run.command)}\n{line}"
    _say(line)
    return is_well


def _summary(output: str) -> str:
    """Pytest's last line, without its decoration and time."""
    lines = output.strip().splitlines() or ["no output"]
    return re.sub(r" in [0-9.]+s.*", "", lines[-1].strip("= "))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
