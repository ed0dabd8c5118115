"""Lightning's own launchers: `Trainer(devices=2)` starts the processes itself."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launching import run

SCRIPT = Path(__file__).with_name("launcher_script.py")


def test_subprocess_launcher(tmp_path: Path) -> None:
    """Both ranks end as under plain DDP, in a tight budget; where all is tried, in bf16 and with accumulation, too."""
    run(SCRIPT, "popen", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"done0", "done1"}


def test_spawning_launcher(tmp_path: Path) -> None:
    """The strategy travels to a spawned process, which plans on its own and ends as under plain DDP."""
    run(SCRIPT, "spawn", tmp_path)
    assert (tmp_path / "done0").exists()
