"""Importing the package is cheap, and leaves the import machinery as it was.

Cases run in fresh interpreters, since what is imported cannot be taken back, or in processes forked off one that has
imported torch alone. That the package registers with Lightning in either order is in `tests.lightning.test_packages`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that can import this checkout, and return what it printed."""
    no_failed_registration = "error:lightning-offload:RuntimeWarning"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": no_failed_registration}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_imports_neither_torch_nor_lightning() -> None:
    """The package alone, its errors and its units pull in nothing heavy, so no CUDA context either."""
    heavy = ["torch", "numpy", "scipy", "lightning", "pytorch_lightning", "transformers", "pynvml", "rich"]
    out = run_python(f"""
        import sys
        import lightning_offload, lightning_offload.errors, lightning_offload.units
        dir(lightning_offload)
        print([name for name in {heavy} if name in sys.modules])
    """)
    assert out.strip() == "[]"


def test_graph_and_planning_import_no_torch() -> None:
    """Plans are made and read where torch is not installed."""
    out = run_python("""
        import importlib, pkgutil, sys
        for package in ("lightning_offload.graph", "lightning_offload.planning"):
            module = importlib.import_module(package)
            for info in pkgutil.walk_packages(module.__path__, package + "."):
                importlib.import_module(info.name)
        print("torch" in sys.modules)
    """)
    assert out.strip() == "False"


LEFT_AS_IT_WAS = """
import importlib, importlib.resources, importlib.util, inspect, pickle, sys
import lightning_offload
from lightning_offload import _registration

spec = importlib.util.find_spec("pytorch_lightning")     # finding is not importing
assert spec.origin.endswith("__init__.py") and spec.submodule_search_locations
assert spec.loader.get_source("pytorch_lightning") and spec.loader.path == spec.origin
assert pickle.loads(pickle.dumps(spec.loader)).path == spec.origin
assert "pytorch_lightning" not in sys.modules
assert importlib.util.find_spec("lightning_offload.no_such_module") is None

import pytorch_lightning
loader = pytorch_lightning.__spec__.loader
assert type(loader).__module__.startswith(("importlib", "_frozen_importlib")), type(loader)
assert pytorch_lightning.__loader__ is loader
assert inspect.getsource(pytorch_lightning)
assert importlib.resources.files("pytorch_lightning").joinpath("__init__.py").is_file()
assert pickle.loads(pickle.dumps(pytorch_lightning.Trainer)) is pytorch_lightning.Trainer

registry = sys.modules["pytorch_lightning.strategies"].StrategyRegistry
registry.remove("offload")
importlib.reload(pytorch_lightning)
assert "offload" in registry

num_finders = len(sys.meta_path)
importlib.reload(_registration)
importlib.reload(lightning_offload)
assert len(sys.meta_path) == num_finders
"""

FAILING = """
import sys, types, warnings
broken = types.ModuleType("lightning_offload.strategies")
def register(package):
    raise KeyError(package)
broken.register = register
import lightning_offload
sys.modules["lightning_offload.strategies"] = broken
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import pytorch_lightning
assert pytorch_lightning.Trainer
ours = [str(w.message) for w in caught if "lightning-offload could not register" in str(w.message)]
assert len(ours) == 1 and "OffloadStrategy" in ours[0], ours
"""

# A process that dies says nothing, which is not what one says that ends well.
FORKING = """
import json, os, sys, traceback
from lightning_offload import MemoryPlugin
import torch
found = {
    "parent": [name in sys.modules for name in ("lightning", "pytorch_lightning")] + [torch.cuda.is_initialized()]
}
for name, code in CASES.items():
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            exec(code, {"__name__": "__main__"})
            text = "well"
        except BaseException:
            text = traceback.format_exc()
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with open(read) as said:
        found[name] = said.read()
    os.wait()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def forked() -> dict[str, object]:
    """What a process sees that has imported the plugin and torch, and how each case went that was forked off it."""
    cases = {"left as it was": LEFT_AS_IT_WAS, "failing": FAILING}
    found: dict[str, object] = json.loads(run_python(f"CASES = {cases!r}\n{FORKING}").splitlines()[-1])
    return found


def test_the_memory_plugin_imports_no_lightning(forked: dict[str, object]) -> None:
    """Plain PyTorch users pay for torch alone, and no CUDA context is created."""
    assert forked["parent"] == [False, False, False]


def test_the_import_machinery_is_left_as_it_was(forked: dict[str, object]) -> None:
    """After the import nothing of ours is on the module; source, spec, pickling and reload work."""
    assert forked["left as it was"] == "well"


def test_a_failing_registration_is_a_warning(forked: dict[str, object]) -> None:
    """A Lightning that we cannot register with can still be imported."""
    assert forked["failing"] == "well"
