"""Trainings by other people's packages, within a budget: are they theirs bit for bit, and what do they cost?

Each client trains a small net on synthetic data by its own entry point, plain, within a share of plain's peak and
within an ample budget, each in a process of its own with the same seed (`benchmarks.clients`). Compared are losses,
weights and random state; peaks, counted from outside; and CPU time. `--cases NAME` runs some and keeps the others as
they were stored. A training whose packages are not there is a row that says so, one whose budget is refused too; other
bits, an error, and a peak above the budget that nothing told are errors. `make test-clients` brings the packages;
`--quick` trains a loop in plain PyTorch.

Clients that find their batch size are trained plain, with a finder's defaults and with one for throughput.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.progress import Progress

from benchmarks import environment
from benchmarks.clients import judging, judging_sizes
from benchmarks.clients.listing import CLIENTS, REHEARSAL, Client
from benchmarks.clients.page import DOCUMENT, page, terminal_table
from benchmarks.gpu.process import Job, launch
from benchmarks.results import RESULTS_FOLDER, Measurements, Options, Row, error_row, result_path

__all__ = ["DOCUMENT", "TITLE", "page", "run", "table"]

TITLE = "Other people's packages"
_TIMEOUT_SECONDS = 500
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "120"}


def run(options: Options, progress: Progress) -> Measurements:
    """Train all clients, or those that are named.

    Raises:
        ValueError: There is no such client.
    """
    clients = (REHEARSAL,) if options.quick else _chosen(options.cases)
    records = {} if options.quick else _stored(options)
    commit = environment.describe("cpu")["commit"]
    task = progress.add_task("clients", total=len(clients))
    for client in clients:
        progress.update(task, description=client.title)
        records[client.name] = {**_record(client, quick=options.quick), "commit": commit}
        progress.advance(task)
        state, seconds = records[client.name]["state"], records[client.name]["seconds"]
        progress.console.print(f"{client.title}: {state}, {seconds:.0f} s")
    ordered = {c.name: records[c.name] for c in (*CLIENTS, REHEARSAL) if c.name in records}
    return Measurements(
        rows=[row for record in ordered.values() for row in _rows(record)],
        config={"clients": list(ordered.values())},
        repeats=1,
        notes={record["title"]: "; ".join(record["faults"]) for record in ordered.values() if record["faults"]},
    )


def table(measurements: Measurements) -> Any:
    """What a terminal is shown."""
    return terminal_table(measurements.config["clients"])


def _chosen(names: Sequence[str]) -> Sequence[Client]:
    known = {client.name: client for client in CLIENTS}
    for name in names:
        if name not in known:
            raise ValueError(f"unknown client {name!r}; the clients are {', '.join(known)}")
    return [known[name] for name in names] or CLIENTS


def _stored(options: Options) -> dict[str, dict[str, Any]]:
    """What was measured before of clients that are not run now."""
    path = result_path("clients", "cpu", options.folder or RESULTS_FOLDER)
    if not options.cases or not path.exists():
        return {}
    known = {client.name for client in CLIENTS}
    records = json.loads(path.read_text(encoding="utf-8"))["config"]["clients"]
    return {record["name"]: record for record in records if record["name"] in known}


def _record(client: Client, *, quick: bool) -> dict[str, Any]:
    """All that is kept of a client: what it is, its state, figures, faults, and what was told."""
    record: dict[str, Any] = {"name": client.name, "title": client.title, "added": client.added}
    record |= {"finds": True} if client.finds else {}
    options = {"times": client.finds, "long_times": client.long, "has_size": client.has_size}
    job = Job(
        function=f"benchmarks.clients.{'finding' if client.finds else 'runs'}:measure",
        device="cpu",
        quick=quick,
        arguments={
            "name": client.training or client.name,
            "packages": list(client.packages),
            **(options if client.finds else {}),
        },
        environment=_ONE_THREAD,
    )
    ended = launch(job, _TIMEOUT_SECONDS)
    if ended.state != "done":
        faults = [ended.message]
        return {
            **record,
            "state": "failed",
            "faults": faults,
            "figures": {},
            "seconds": ended.seconds,
            "log": ended.log,
        }
    found = ended.content
    record |= {"versions": found.get("versions", {}), "seconds": round(ended.seconds, 1), "figures": {}, "faults": []}
    if "missing" in found:
        return {**record, "state": "missing", "message": found["missing"]}
    judge = judging_sizes if client.finds else judging
    faults = judge.faults(found)
    if judging.runs_done(found, ""):
        record["figures"] = judge.figures(found)
    if client.finds:
        record |= {"state": "failed" if faults else "done", "faults": faults, "says": judging_sizes.told(found)}
        return {**record, **({"log": ended.log} if faults else {})}
    state = "failed" if faults else "refused" if judging.is_refused(found) else "kept"
    tight = found["runs"].get("tight, counted")
    return {
        **record,
        "state": state,
        "faults": faults,
        "refused": found["refused"],
        "warnings": tight["seen"]["warnings"] if tight else [],
        **({"log": ended.log} if faults else {}),
    }


def _rows(record: dict[str, Any]) -> list[Row]:
    rows = [Row(case=record["title"], metric=metric, value=value) for metric, value in record["figures"].items()]
    return [*rows, error_row(record["title"])] if record["faults"] else rows
