"""What importing the report costs."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_report_imports_nothing_optional() -> None:
    """Neither torch nor plotly nor rich: a plan is looked at where they are not installed, as far as that goes."""
    code = "import sys, lightning_offload.report; print([m for m in ('torch', 'plotly', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
