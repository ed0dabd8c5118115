"""Importing the package is cheap, and registers with Lightning in either order of import.

Every case runs in a fresh interpreter, since what is imported cannot be taken back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]

# What registering means, seen from outside: the name is in that package's registry, and nothing of ours that
# needs torch was imported for it.
CHECK = """
import importlib, sys
assert "offload" in importlib.import_module(PACKAGE + ".strategies").StrategyRegistry, "not registered"
assert "lightning_offload.plugins.memory" not in sys.modules, "registration is not lazy"
"""


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


def test_the_memory_plugin_imports_no_lightning() -> None:
    """Plain PyTorch users pay for torch alone, and no CUDA context is created."""
    out = run_python("""
        import sys
        from lightning_offload import MemoryPlugin
        import torch
        print("lightning" in sys.modules, "pytorch_lightning" in sys.modules, torch.cuda.is_initialized())
    """)
    assert out.strip() == "False False False"


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_registers_in_either_order(package: str, first: str) -> None:
    """The name "offload" is known to each Lightning package, imported before or after ours."""
    imports = ["import lightning_offload", f"import {package}"]
    code = "\n".join(imports if first == "ours" else imports[::-1])
    run_python(f"{code}\nPACKAGE = {package!r}\n{CHECK}")


def test_registers_with_both_packages() -> None:
    """Two Lightning packages in one process have a registry each, and both know the name."""
    code = "import pytorch_lightning, lightning_offload, lightning.pytorch\n"
    run_python(code + "".join(f"PACKAGE = {package!r}\n{CHECK}" for package in PACKAGES))


def test_the_import_machinery_is_left_as_it_was() -> None:
    """After the import nothing of ours is on the module; source, spec, pickling and reload work."""
    run_python("""
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
    """)


def test_a_failing_registration_is_a_warning() -> None:
    """A Lightning that we cannot register with can still be imported."""
    run_python("""
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
    """)
