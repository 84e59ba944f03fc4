"""scripts/gpu_check.py on the CPU, as users run it: the figures are there and sane, and a mode that fails is one line. What a card does
this cannot show."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.torch


def run(*argv: str) -> tuple[int, dict[str, list[str]], str]:
    """(exit code, the words of each row of the table, all that was said)."""
    paths = f"{REPO}{os.pathsep}{REPO / 'tests'}"
    # What a launcher tells its processes means nothing here.
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "203.0.113.1", "MASTER_PORT": "1"}
    env = {**os.environ, **launched, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *argv], env=env, capture_output=True, text=True)
    rows = re.findall(r"^([a-z-]+) {2,}(\S.*)$", done.stdout, re.MULTILINE)
    return done.returncode, {name: cells.split() for name, cells in rows}, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize(
    "modes", [("plain", "flash"), pytest.param(("plain", "flash", "lora"), marks=pytest.mark.slow)]
)
def test_each_mode_has_its_figures(tmp_path: Path, modes: tuple[str, ...]) -> None:
    script, written_to = str(REPO / "scripts" / "gpu_check.py"), tmp_path / "figures.json"
    code, rows, said = run(script, "--dir", str(tmp_path), "--json", str(written_to), "--modes", *modes)
    assert code == 0, said
    record = json.loads(written_to.read_text())
    written_to.unlink()
    assert record["accelerator"] == "CPU" and record["notes"] == []
    assert [*record["modes"]["plain"].values()] == rows["plain"]
    assert record["modes"]["plain"]["gradient"] == rows["plain"][6]
    assert record["modes"]["flash"]["result"].startswith("not tried:")
    assert list(rows) == ["mode", *modes], said
    assert rows.pop("flash")[:2] == ["not", "tried:"]
    assert rows.pop("mode")[:2] == ["tokens/s", "s/step"]
    for cells in rows.values():
        tokens_s, step_s, use, peak, reserved, plan, gradient, written, read = cells
        # 16 sequences, of which four have 64 tokens and the others at least 32.
        assert 16 * 32 < number(tokens_s) * number(step_s) < 16 * 64
        assert use == reserved == "-"
        assert 0.05 < number(peak) < 8 and 2 <= number(plan) < 2.2
        assert all(number(cell) > 0 for cell in (gradient, written, read))
    assert "plain: step 4 of 4" in said and f"{modes[0]}: reading the checkpoint" in said
    if "lora" in modes:
        assert rows["plain"][6] != rows["lora"][6] and "lora: reading the checkpoint" in said
    assert not list(tmp_path.iterdir())


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


@pytest.mark.parametrize(
    "flags",
    [
        "--size 9b",
        "--modes plain,lora",
        "--steps 1",
        "--layers 0",
        "--dir /nowhere",
        "--json /nowhere/x.json",
    ],
)
def test_bad_flags_are_refused_by_name(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    from scripts import gpu_check

    with pytest.raises(SystemExit) as ended:
        gpu_check.options_of(flags.split())
    assert ended.value.code == 2
    assert flags.split()[0] in capsys.readouterr().err
