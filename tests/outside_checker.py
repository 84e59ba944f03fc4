"""Judges what a run left, knowing nothing of the code: it reads the files and the journal as docs/protocol.md describes them.

    python tests/outside_checker.py LOG_PATH [--tasks N]

Imports nothing of fsbarrier, so that a fault in its readers cannot hide a fault in what they read. Prints one line for each thing
that is wrong, and ends with 1 if there is any. `--tasks`: how many tasks each iteration rolls out; without it nothing is merged.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import itertools
import json
import pickle
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PHASES = 14
LAST = PHASES - 1
#: what is read of a journal's line: journals of thousands of iterations are long
READ = ("event", "generation", "iteration", "phase", "node_rank", "incarnation", "mono_s")
READ_TOO = ("leader", "members", "final", "split", "parts", "iterations")
PART = re.compile(r"_rank_(\d+)\.checkpoint\.g(\d+)i(\d+)v\d+\.part$")
Place = tuple[int, int, int]


def judge(log_path: Path, tasks: int | None) -> list[str]:
    """Everything that is wrong with a run that has ended."""
    generations, wrong = read_generations(log_path)
    journals = read_journals(log_path)
    wrong += leaders(generations, journals)
    for name, lines in journals.items():
        wrong += [f"{name}: {what}" for what in order_of_phases(lines)]
    wrong += barriers(generations, journals)
    wrong += whole_iterations(generations, journals)
    if tasks is not None:
        wrong += merged_files(log_path, tasks, generations, journals)
        wrong += served_policy(log_path)
    return wrong


# --- records and journals -----------------------------------------------------------------------------------------------------


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """A record: one line of header with its length and digest, and one of JSON. Raises ValueError."""
    header, _, body = path.read_bytes().partition(b"\n")
    words = header.decode("ascii").split(" ")
    if words != ["fsbarrier/2", kind, str(len(body)), hashlib.sha256(body).hexdigest()[:32]]:
        raise ValueError(f"{path}: {header!r} is not the header of this {kind}")
    record = json.loads(body)
    assert isinstance(record, dict)
    return record


def read_generations(log_path: Path) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """The log of generations: each number once, each record whole, its leader one of its members."""
    found: dict[int, dict[str, Any]] = {}
    wrong = []
    for path in sorted((log_path / "coordination" / "generations").glob("gen-*.json")):
        try:
            record = read_record(path, "generation")
        except ValueError as error:
            wrong.append(str(error))
            continue
        number = record["number"]
        if path.name != f"gen-{number:06d}.json" or number in found:
            wrong.append(f"{path.name} holds generation {number}")
        found[number] = record
        ranks = [member["rank"] for member in record["members"]]
        if len(set(ranks)) != len(ranks):
            wrong.append(f"generation {number} names a rank twice: {ranks}")
        if record.get("verdict") is None and record["leader"] not in ranks:
            wrong.append(f"generation {number}: its leader {record['leader']} is none of {ranks}")
    if sorted(found) != list(range(1, len(found) + 1)):
        wrong.append(f"generations are not numbered from 1 without a gap: {sorted(found)}")
    starts = [(found[n]["start"]["iteration"], n) for n in sorted(found)]
    wrong += [
        f"generation {n} starts before the one ahead of it"
        for (a, _), (b, n) in itertools.pairwise(starts)
        if b < a
    ]
    return found, wrong


def read_journals(log_path: Path) -> dict[str, list[dict[str, Any]]]:
    """The journals by file name, in the order in which they were written; only a last line may be torn, by a death."""
    journals = {}
    for path in sorted((log_path / "events").glob("*.jsonl")):
        with path.open("rb") as file:
            whole = (json.loads(line) for line in file if line.endswith(b"\n"))
            journals[path.name] = [
                {key: line[key] for key in READ + READ_TOO if key in line} for line in whole
            ]
    return journals


def place(line: dict[str, Any]) -> Place:
    return line["generation"], line["iteration"], line["phase"]


def placed(journals: dict[str, list[dict[str, Any]]], event: str) -> Iterator[tuple[Place, dict[str, Any]]]:
    for lines in journals.values():
        yield from ((place(line), line) for line in lines if line["event"] == event)


# --- who led, and in which order ----------------------------------------------------------------------------------------------


def leaders(
    generations: dict[int, dict[str, Any]], journals: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """All who entered a generation were named by its record, and followed its leader; only that one decided."""
    for (number, _, _), line in placed(journals, "generation_started"):
        record, rank = generations.get(number), line["node_rank"]
        if record is None:
            yield f"node {rank} entered generation {number}, of which there is no record"
            continue
        named = {member["rank"]: member["incarnation"] for member in record["members"]}
        if named.get(rank) != line["incarnation"]:
            yield f"node {rank} (incarnation {line['incarnation']}) entered generation {number} of {named}"
        if line["leader"] != record["leader"] or line["members"] != sorted(named):
            yield f"node {rank} entered generation {number} as {line['members']} under {line['leader']}"
    for at, line in placed(journals, "decision"):
        if line["node_rank"] != generations.get(at[0], {}).get("leader"):
            yield f"node {line['node_rank']} decided in {at}, which it does not lead"


def order_of_phases(lines: list[dict[str, Any]]) -> Iterator[str]:
    """One node's phases only go forward, one after the other within a generation; it leaves only where it is."""
    at: Place | None = None
    left: Place | None = None
    for line in lines:
        if line["event"] == "phase_started":
            now = place(line)
            if at is not None and now <= at:
                yield f"{now} after {at}"
            following = at is not None and (at[0], at[1] + at[2] // LAST, (at[2] + 1) % PHASES)
            if at is not None and now[0] == at[0] and (now != following or left != at):
                yield f"{now} follows {at}, of which {left} was finished last"
            at = now
        elif line["event"] == "phase_finished":
            left = place(line)
            if left != at:
                yield f"{left} was finished in {at}"


def barriers(
    generations: dict[int, dict[str, Any]], journals: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Nobody left a phase before every member of its generation had entered it, and all of this host's clock."""
    entered: dict[Place, dict[int, float]] = collections.defaultdict(dict)
    for at, line in placed(journals, "phase_started"):
        if line["node_rank"] in entered[at]:
            yield f"node {line['node_rank']} entered {at} twice"
        entered[at][line["node_rank"]] = line["mono_s"]
    for at, line in placed(journals, "phase_finished"):
        members = {member["rank"] for member in generations.get(at[0], {"members": []})["members"]}
        late = {rank for rank in members if entered[at].get(rank, float("inf")) > line["mono_s"]}
        if late:
            yield f"node {line['node_rank']} left {at} before {sorted(late)} entered it"


def whole_iterations(
    generations: dict[int, dict[str, Any]], journals: dict[str, list[dict[str, Any]]]
) -> Iterator[str]:
    """Every iteration that was finished went through all its phases, each of them in its last generation or in one before."""
    passed: dict[int, set[int]] = collections.defaultdict(set)
    for (_, iteration, phase), _line in placed(journals, "phase_finished"):
        passed[iteration].add(phase)
    finished = {line["iteration"] for _, line in placed(journals, "iteration_finished")}
    if finished and sorted(finished) != list(range(1, max(finished) + 1)):
        yield f"these iterations were finished: {sorted(finished)}"
    for iteration in finished:
        if passed[iteration] != set(range(PHASES)):
            yield f"iteration {iteration} was finished with the phases {sorted(passed[iteration])}"


# --- what was made ------------------------------------------------------------------------------------------------------------


class Plain(pickle.Unpickler):
    """Values and flat tensors; whatever else a torch file may name is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda storage, *rest: storage
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def read_torch(path: Path) -> dict[str, Any]:
    """What torch.load would give, but for the tensors' numbers; every entry's checksum is verified."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"{path}: {damaged} is damaged")
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        value = Plain(io.BytesIO(archive.read(name))).load()
    assert isinstance(value, dict)
    return value


def merged_files(
    log_path: Path,
    tasks: int,
    generations: dict[int, dict[str, Any]],
    journals: dict[str, list[dict[str, Any]]],
) -> Iterator[str]:
    """Each task exactly once in every merged file; nothing in it of an older generation that was not adopted by name."""
    aggregated = {at[1] for at, _ in placed(journals, "phase_finished") if at[2] == 4}
    # The last policy's file has the number of the iteration that would begin with it.
    evaluated = {at[1] + bool(event.get("final")) for at, event in placed(journals, "evaluated")}
    # Clean-up goes from the oldest on. A leader that is killed meanwhile does not say of all files that they are gone.
    removed = [max(event["iterations"]) for _, event in placed(journals, "trajectories_removed")]
    kept_from = max(removed, default=0) + 1
    adopted: dict[tuple[int, int, str], dict[str, int]] = collections.defaultdict(dict)
    for at, line in placed(journals, "parts_adopted"):
        adopted[at[0], at[1], line["split"]].update({part["name"]: part["bytes"] for part in line["parts"]})
    for split, iterations in (("train", aggregated), ("test", evaluated)):
        for iteration in sorted(each for each in iterations if each >= kept_from):
            name = f"{split}_trajectories.pt.iteration{iteration}"
            path = log_path / f"{split}_trajectories" / name
            try:
                value = read_torch(path)
            except (OSError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
                yield f"{name} cannot be read: {error}"
                continue
            yield from (f"{name}: {what}" for what in one_merged(value, tasks, iteration, split))
            yield from (f"{name}: {what}" for what in unadopted(value["metadata"], generations, adopted))


def one_merged(value: dict[str, Any], tasks: int, iteration: int, split: str) -> Iterator[str]:
    trajectories, metadata = value["trajectories"], value["metadata"]
    counts = collections.Counter((one["task_index"], one["sample"]) for one in trajectories)
    twice = sorted(key for key, count in counts.items() if count > 1)
    lost = sorted(set(range(tasks)) - {index for index, _ in counts})
    foreign = sorted({index for index, _ in counts} - set(range(tasks)))
    if twice or lost or foreign:
        yield f"twice {twice}, lost {lost}, foreign {foreign}"
    if {one["policy_version"] for one in trajectories} - {iteration - 1}:
        yield f"policy versions {sorted({one['policy_version'] for one in trajectories})}"
    if (metadata["iteration"], metadata["split"], metadata["trajectories"]) != (
        iteration,
        split,
        len(trajectories),
    ):
        yield f"it says of itself {metadata}"


def unadopted(
    metadata: dict[str, Any],
    generations: dict[int, dict[str, Any]],
    told: dict[tuple[int, int, str], dict[str, int]],
) -> Iterator[str]:
    """The parts of older generations that the merging one had not adopted, by name and by how much of them is valid.

    What it adopted is in its record, or its leader decided it and said so in its journal (`told`).
    """
    number, iteration, split = metadata["generation"], metadata["iteration"], metadata["split"]
    record = generations[number]
    decision = record["decisions"].get("train_assign" if split == "train" else "eval_decide")
    if decision is not None and decision["iteration"] == iteration:
        adopted = {part["name"]: part["valid_bytes"] for part in decision["value"]["adopted"]}
    else:
        adopted = told.get((number, iteration, split), {})
    members = {(member["rank"], member["incarnation"]) for member in record["members"]}
    for part in metadata["parts"]:
        match = PART.search(part["name"])
        if match is None:
            yield f"merged from {part['name']}, which is no part"
            continue
        rank, generation, incarnation = map(int, match.groups())
        own = generation == number and (rank, incarnation) in members
        if not own and adopted.get(part["name"]) != part["bytes"]:
            yield f"merged from {part['name']} ({part['bytes']} bytes), adopted were {adopted}"


def served_policy(log_path: Path) -> Iterator[str]:
    """What model.pt names is complete: every file as its manifest says."""
    served = log_path / "model.pt"
    if not served.exists():
        return
    folder = served.resolve().parent
    for name, about in json.loads((folder / "MANIFEST.json").read_text())["files"].items():
        data = (folder / name).read_bytes()
        if (len(data), hashlib.sha256(data).hexdigest()) != (about["bytes"], about["sha256"]):
            yield f"{folder.name}/{name} is not what its manifest says"


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge what a run that has ended left.")
    parser.add_argument("log_path", type=Path)
    parser.add_argument("--tasks", type=int, default=None, help="tasks of an iteration")
    arguments = parser.parse_args()
    wrong = judge(arguments.log_path, arguments.tasks)
    print("\n".join(wrong) or "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
