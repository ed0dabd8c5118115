"""The checks of conftest.py see what a test leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

LEFTOVERS = {
    "threads lightning-offload-lane": """
        import threading
        stop = threading.Event()
        threading.Thread(target=stop.wait, args=(8,), name="lightning-offload-lane", daemon=True).start()
    """,
    "dispatch modes": """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Left(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))
        Left().__enter__()
    """,
    "saved-tensor hooks": """
        import torch
        torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t).__enter__()
    """,
    "global hooks _global_optimizer_pre_hooks": """
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        register_optimizer_step_pre_hook(lambda *_: None)
    """,
    "processes": """
        import subprocess
        left.append(subprocess.Popen(["sleep", "8"]))
    """,
    "spill files": """
        import tempfile
        left.append(tempfile.TemporaryFile(prefix="lightning-offload-"))
    """,
}


def test_leftovers_are_found_and_hooks_taken_off_again(pytester: pytest.Pytester) -> None:
    """Each kind of leftover fails the test that left it, by name, and no other test."""
    code = ["left = []"]
    for i, body in enumerate(LEFTOVERS.values()):
        code += [f"def test_leaves_{i}():{body}", f"def test_clean_{i}(): pass"]
    pytester.makepyfile("\n".join(code))
    pytester.makeconftest((Path(__file__).parent / "conftest.py").read_text())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--rootdir=."],
        cwd=pytester.path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    num = len(LEFTOVERS)
    assert f"{2 * num} passed, {num} errors" in done.stdout, done.stdout + done.stderr
    for name in LEFTOVERS:
        assert f"the test left behind: {name}" in done.stdout, name
