"""Writes the table of docs/models.md: what a tiny model of each family does in real runs, on this machine's CPU.

    python tests/models_page.py                     # every family: about a minute and a half each on two quiet cores
    python tests/models_page.py GptOss Qwen3Moe     # these, the other rows stay

A family is run twice: two iterations that train all weights, and two with LoRA. The first line of a run that refuses or fails is its row.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families import FAMILIES, write_family

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "models.md"
NOT_RUN = "not run yet"
HEAD = "| family | all weights | gap: first version, after updates | new weights reach vLLM by | LoRA |"
#: the lengths of answers differ, so that there is something to learn from
REWARD = "def score(prompt, response, answer, metadata):\n    return len(set(response)) / 8\n"
SETTINGS = (
    *("rollout.tasks=8", "rollout.samples=4", "rollout.max_tokens=8", "optimizer.warmup_steps=0"),
    *("optimizer.lr=1e-4", "--eval-interval", "0"),
)
FULL: tuple[str, ...] = ("--iterations", "2")
LORA: tuple[str, ...] = ("--iterations", "2", "lora.rank=4")


@dataclass(frozen=True)
class Outcome:
    """How a run ended: the gaps between the log-probabilities of engine and trainer, by version, and how versions after the first were
    loaded. `failed`: the run's own reason, "" if it did all that it was asked."""

    gaps: tuple[float, ...]
    loaded: tuple[str, ...]
    failed: str


def run(family: str, folder: Path, words: Sequence[str]) -> Outcome:
    """One run of this family's model."""
    model, data, log_path = folder / "model", folder / "data", folder / words[-1].replace("=", "-")
    if not model.exists():
        data.mkdir()
        write_family(family, model)
        (data / "reward.py").write_text(REWARD)
        for split, letters in (("train", "abcdefghijklmnop"), ("test", "ponm")):
            lines = [{"prompt": letters[k:] + letters[:k], "answer": "a"} for k in range(len(letters))]
            (data / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "fsbarrier", "run", "--master", "--num-nodes", "1"]
    command += ["--model", str(model), "--data-path", str(data), "--log-path", str(log_path)]
    command += [f"reward.kind={data}/reward.py:score", *SETTINGS, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(REPO)}
    )
    events = read_events(log_path)
    gaps = tuple(e["logprob_gap_mean"] for e in events if e["event"] == "updated")
    ready = [e for e in events if e["event"] == "engine_ready" and e["serving"] > 0]
    failed = "" if done.returncode == 0 else reason(done.stderr, folder)
    if failed:
        print(done.stderr[-6000:], file=sys.stderr)
    return Outcome(gaps, tuple(e["engine_action"] for e in ready), failed)


def read_events(log_path: Path) -> list[dict[str, Any]]:
    """The events of a run's only node, in order."""
    lines = [line for path in sorted((log_path / "events").glob("*.jsonl")) for line in path.open()]
    return [json.loads(line) for line in lines]


def reason(said: str, folder: Path) -> str:
    """The line that says why a run failed, else the last one, without what is this machine's."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("fsbarrier: error: ") or "; given up after " in line]
    line = (told or lines[-1:] or ["no message"])[0]
    line = re.sub(r"^fsbarrier: (error: )?(node \d[^:]*: )?", "", line).partition("; given up after ")[0]
    return line.replace(str(folder), "…").replace("|", "/")[:300]


def row(family: str) -> str:
    """This family's row of the table."""
    with tempfile.TemporaryDirectory() as made:
        full, lora = (run(family, Path(made), words) for words in (FULL, LORA))
    trained = full.failed or "trained"
    gaps = ", ".join(f"{gap:.0e}" for gap in full.gaps) or "–"
    loaded = {"reloaded": "a reload in place", "started": "a restart"}
    ways = sorted({loaded.get(way, way) for way in full.loaded}) or ["–"]
    return f"| {family} | {trained} | {gaps} | {', '.join(ways)} | {lora.failed or 'trained'} |"


def rows(page: str) -> dict[str, str]:
    """The rows that a page has, by family."""
    lines = (line for line in page.splitlines() if line.startswith("| "))
    return {name: line for line in lines if (name := line.split(" ")[1]) in FAMILIES}


def with_rows(page: str, known: Mapping[str, str]) -> str:
    """The page with a table of these rows; the families without one are listed as not run."""
    before, _, rest = page.partition(HEAD)
    after = rest.partition("\n\n")[2]
    table = [known.get(name, f"| {name} | {NOT_RUN} | – | – | – |") for name in FAMILIES]
    return "\n".join([before + HEAD, "| --- " * HEAD.count(" | ") + "| --- |", *table]) + f"\n\n{after}"


def main(wanted: Sequence[str]) -> None:
    for family in wanted or FAMILIES:
        made = row(family)
        print(made, flush=True)
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_rows(text, {**rows(text), family: made}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
