"""The rollout program as a process of its own, against a server that fails in all the ways that servers do (fake_vllm.py)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forks import run_warm
from waiting import DEADLINE_S, free_port, slowness, until

from fsbarrier.data.merge import MergeRequest, Part, merge
from fsbarrier.rundir.paths import RunPaths
from fsbarrier.settings.resolve import resolve
from fsbarrier.trajectories import iter_trajectories, load, scan_rank_file

HERE = Path(__file__).parent
KEY = "the key"
SAMPLES = 4


@dataclass
class Fake:
    """A running stand-in server."""

    folder: Path
    process: subprocess.Popen[str]
    url: str

    def requests(self, path: str = "/v1/completions") -> list[dict[str, Any]]:
        lines = (self.folder / "requests.jsonl").read_text().splitlines()
        return [request for request in map(json.loads, lines) if request["path"] == path]


@dataclass
class Run:
    """How a rollout ended."""

    code: int
    stderr: str
    result: dict[str, Any] = field(default_factory=dict)
    #: its lines for the journal
    events: list[dict[str, Any]] = field(default_factory=list)


def start_fake(folder: Path, *, port: int | None = None, **mode: Any) -> Fake:
    folder.mkdir()
    # When it ends, nobody else has its port.
    port = port or free_port()
    environ = {**os.environ, "VLLM_API_KEY": KEY, "FAKE_VLLM": json.dumps({"dir": str(folder), **mode})}
    command = [sys.executable, str(HERE / "fake_vllm.py"), "--model", "/models/m", "--port", str(port)]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            break
    return Fake(folder, process, f"http://127.0.0.1:{(folder / 'port').read_text()}")


def make_spec(folder: Path, url: str, prompts: list[Any], **changes: Any) -> Path:
    """A spec for `prompts`; the answers are their sorted letters. `changes`: dotted settings, or the spec's own fields."""
    lines = []
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        answer = "".join(sorted(text.partition("=")[0].partition("!")[0]))
        lines.append(json.dumps({"prompt": prompt, "answer": answer, "level": 3}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    defaults: dict[str, Any] = {"rollout.max_tokens": 8, "engine.max_model_len": 64}
    defaults |= {name: changes.pop(name) for name in list(changes) if "." in name}
    sampling = {
        "samples": SAMPLES,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_tokens": 32,
        "seed": 0,
    }
    spec = {
        "run_id": "run",
        "log_path": str(folder),
        "node_rank": 2,
        "generation": 3,
        "iteration": 5,
        "policy_version": 4,
        "policy": "policy-000004.g0002:0123456789abcdef",
        "split": "train",
        "shares": {"2": list(range(len(prompts)))},
        "fixed_shares": "",
        "claims": str(folder / "claims"),
        "old_claims": [],
        "completion_threshold": 1.0,
        "grace_s": 30.0,
        "there": 0,
        "keep": None,
        "incarnation": 1,
        "part": str(folder / "trajectories" / "part"),
        "checkpoint": str(folder / "trajectories" / "checkpoint"),
        "engine": [{"url": url, "api_key": KEY, "model": "policy"}],
        "log_dir": str(folder),
        "settings": resolve([], defaults, cross_checks=False).as_json(),
        "result": str(folder / "result.json"),
        "progress": str(folder / "progress.json"),
    }
    sampling |= changes.pop("sampling", {})
    spec |= changes
    asked = sorted({task for share in spec["shares"].values() for task in share})
    train = {"tasks": asked, "files": {str(folder / "train.jsonl"): 0}, "sampling": sampling}
    spec.setdefault("rounds", [train])
    (folder / "spec.json").write_text(json.dumps(spec))
    return folder / "spec.json"


def command(spec: Path) -> list[str]:
    return [sys.executable, "-m", "fsbarrier.workers.rollout", "--spec", str(spec)]


def start(spec: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command(spec), stderr=subprocess.PIPE, text=True, cwd=HERE.parent)


def finish(process: subprocess.Popen[str], spec: Path) -> Run:
    _, stderr = process.communicate(timeout=DEADLINE_S)
    return outcome(process.returncode, stderr, spec)


def run(spec: Path) -> Run:
    """A whole rollout, as a fork of a process that has imported what it needs."""
    done = run_warm(command(spec), env={**os.environ, "PYTHONPATH": str(HERE.parent)})
    return outcome(done.returncode, done.stderr, spec)


def outcome(code: int, stderr: str, spec: Path) -> Run:
    path = spec.with_name("result.json")
    if not path.exists():
        return Run(code, stderr)
    result = json.loads(path.read_text())
    return Run(code, stderr, result["report"], result["events"])


def groups_in(part: Path) -> int:
    """How many groups lie durably in a part file."""
    return len(scan_rank_file(part).groups) if part.exists() else 0


def rolled_out(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The trajectories of the part file by task, as they lie there."""
    groups: dict[int, list[dict[str, Any]]] = {}
    for trajectory in iter_trajectories(folder / "trajectories" / "part"):
        groups.setdefault(trajectory["task_index"], []).append(trajectory)
    return groups


def assert_one_line(stderr: str, *parts: str) -> None:
    (line,) = stderr.splitlines()
    for part in parts:
        assert part in line


def test_a_prompt_that_opens_itself_is_not_opened_again(tmp_path: Path) -> None:
    fake = start_fake(tmp_path / "fake", bos=True)
    try:
        ended = run(make_spec(tmp_path, fake.url, ["^dcba=", "ba="]))
    finally:
        fake.process.kill()
        fake.process.communicate()
    assert ended.code == 0, ended.stderr
    prompts = [
        "".join(map(chr, g[0]["token_ids"][: g[0]["prompt_tokens"]])) for g in rolled_out(tmp_path).values()
    ]
    assert prompts == ["^dcba=", "^ba="]


def test_each_trajectory_carries_exactly_what_was_sampled(tmp_path: Path, fake: Fake) -> None:
    chat = [{"role": "system", "content": "sort"}, {"role": "user", "content": "ba="}]
    thinks = {"rollout.chat_template_kwargs": ["enable_thinking=false"]}
    done = run(make_spec(tmp_path, fake.url, ["dcba=", "zyx!wrong=", chat], **thinks))
    assert (done.code, done.stderr) == (0, "")
    asked = [each for each in fake.requests("/tokenize") if "messages" in each]
    assert [each["chat_template_kwargs"] for each in asked] == [{"enable_thinking": False}]
    groups = rolled_out(tmp_path)
    assert sorted(groups) == [0, 1, 2] and all(len(group) == SAMPLES for group in groups.values())
    first = groups[0][1]
    ids = [*map(ord, "dcba="), *map(ord, "abcd"), 1]
    assert first["token_ids"].tolist() == ids and first["token_ids"].typecode == "i"
    assert first["loss_mask"].tolist() == [0] * 5 + [1] * 5 and first["loss_mask"].typecode == "B"
    assert first["logprobs"].tolist() == pytest.approx([0.0] * 5 + [-i / 1000 for i in ids[5:]])
    assert first["logprobs"].typecode == "f" and first["prompt_tokens"] == 5
    known = {
        "task_id": "train-0",
        "task_index": 0,
        "sample": 1,
        "reward": 1.0,
        "reward_parts": {"exact": 1.0},
    }
    known |= {"policy_version": 4, "node_rank": 2, "generation": 3, "iteration": 5, "split": "train"}
    known |= {"prompt": "dcba=", "text": "abcd", "finish_reason": "stop", "valid": True}
    known |= {"metadata": {"level": 3, "answer": "abcd"}}
    assert {name: first[name] for name in known} == known
    said = {"role": "assistant", "content": "abcd"}
    assert first["messages"] == [{"role": "user", "content": "dcba="}, said]
    assert set(first["timings"]) == {"generate_s", "reward_s"}
    assert [item["reward"] for item in groups[1]] == [0.0] * SAMPLES
    assert groups[2][0]["prompt"] == chat
    assert groups[2][0]["token_ids"].tolist()[: groups[2][0]["prompt_tokens"]] == [
        *map(ord, "s:sort\nu:ba=\na:")
    ]


def test_a_text_that_ends_an_answer_is_trained_on_and_not_scored(tmp_path: Path, fake: Fake) -> None:
    """Sorted letters up to `c`; the server keeps one token more, as vLLM keeps the token that completes a text."""
    spec = make_spec(tmp_path, fake.url, ["dcba="], **{"rollout.stop": "c"})
    assert run(spec).code == 0
    for item in rolled_out(tmp_path)[0]:
        assert (item["text"], item["finish_reason"], item["reward"]) == ("ab", "stop", 0.0)
        assert "".join(map(chr, item["token_ids"])) == "dcba=abcd"
    assert {tuple(request["stop"]) for request in fake.requests()} == {("c",)}


def test_the_result_the_progress_and_the_checkpoint(tmp_path: Path, fake: Fake) -> None:
    spec = make_spec(tmp_path, fake.url, ["dcba=", "zyx!wrong=", "ba!long="])
    done = run(spec)
    part, checkpoint = tmp_path / "trajectories" / "part", tmp_path / "trajectories" / "checkpoint"
    result = done.result
    expected = {"groups": 3, "trajectories": 12, "reward_mean": pytest.approx(2 / 3)}
    expected |= {"invalid": 0, "truncated": 4, "refused": 0, "reward_errors": 0, "resumed_groups": 0}
    expected |= {"prompt_tokens": 5 + 10 + 8, "completion_tokens": 4 * (5 + 5 + 2)}
    assert {name: result[name] for name in expected} == expected
    assert result["bytes"] == part.stat().st_size
    assert result["tokens_per_s"] * result["seconds"] == pytest.approx(result["completion_tokens"], rel=0.1)
    assert checkpoint.samefile(part) and scan_rank_file(part).finished
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert (progress["done"], progress["total"], progress["unit"]) == (12, 12, "trajectories")
    assert progress["reward_mean"] == pytest.approx(2 / 3) and progress["note"] == "4 truncated"
    request = fake.requests()[0]
    assert request["repetition_penalty"] == 1.0 and request["min_p"] == 0.0 and "seed" not in request


def test_each_round_has_its_own_file_and_sampling(tmp_path: Path, fake: Fake) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "ca=", "answer": "ac"}\n' * 1)
    greedy = {"samples": 1, "temperature": 0.0, "top_p": 0.5, "top_k": 3, "max_tokens": 6}
    warm = {**greedy, "samples": SAMPLES, "temperature": 0.7}
    rounds = [
        {"tasks": [0, 1], "files": {str(tmp_path / "train.jsonl"): 0}, "sampling": warm, "eval_set": "warm"},
        {"tasks": [2], "files": {str(other): 2}, "sampling": greedy, "eval_set": "greedy"},
    ]
    tasks: dict[str, Any] = {"shares": {"2": [0, 1, 2]}}
    spec = make_spec(tmp_path, fake.url, ["ba=", "dc="], rounds=rounds, **tasks)
    done = run(spec)
    assert (done.code, done.result["groups"], done.result["trajectories"]) == (0, 3, 2 * SAMPLES + 1)
    groups = rolled_out(tmp_path)
    assert {task: (len(group), group[0]["eval_set"]) for task, group in groups.items()} == {
        0: (SAMPLES, "warm"),
        1: (SAMPLES, "warm"),
        2: (1, "greedy"),
    }
    assert groups[2][0]["prompt"] == "ca=" and groups[2][0]["task_id"] == "other-0"
    asked = {(r["n"], r["temperature"], r["top_p"], r["top_k"], r["max_tokens"]) for r in fake.requests()}
    assert asked == {(SAMPLES, 0.7, 0.5, 3, 6), (1, 0.0, 0.5, 3, 6)}
    shown = json.loads((tmp_path / "progress.json").read_text())
    assert (shown["done"], shown["total"]) == (2 * SAMPLES + 1, 2 * SAMPLES + 1)


def test_after_a_broken_connection_only_what_is_missing_is_asked_for_again(
    tmp_path: Path, fake: Fake
) -> None:
    prompts = ["dcba=", "cab!cut=", "zx="]
    assert run(make_spec(tmp_path, fake.url, prompts)).code == 0
    assert [request["prompt"] for request in fake.requests()] == [prompts, ["cab!cut="]]
    assert Counter(item["task_index"] for item in iter_trajectories(tmp_path / "trajectories" / "part")) == {
        0: SAMPLES,
        1: SAMPLES,
        2: SAMPLES,
    }
    assert all(len(item["token_ids"]) == 8 + 4 for item in rolled_out(tmp_path)[1])


@pytest.mark.parametrize(
    ("kind", "told"), [("!400", "HTTP 400: the prompt is too long"), ("!500", "HTTP 500: cannot")]
)
def test_a_prompt_that_is_refused_is_accounted_for_and_the_others_go_on(
    tmp_path: Path, fake: Fake, kind: str, told: str
) -> None:
    done = run(make_spec(tmp_path, fake.url, ["ba=", f"dc{kind}=", "fe="]))
    assert done.code == 0
    assert_one_line(done.stderr, "task 1: the engine rejects it: ", told)
    assert (done.result["refused"], done.result["invalid"], done.result["groups"]) == (1, SAMPLES, 3)
    groups = rolled_out(tmp_path)
    assert [item["reward"] for item in groups[0] + groups[2]] == [1.0] * 2 * SAMPLES
    for item in groups[1]:
        assert (item["valid"], item["reward"], item["finish_reason"], item["text"]) == (
            False,
            0.0,
            "error",
            "",
        )
        assert (
            len(item["token_ids"]) == len(item["logprobs"]) == len(item["loss_mask"]) == item["prompt_tokens"]
        )
        assert told in item["metadata"]["error"]


def test_a_server_that_refuses_everything_fails_the_phase_early(tmp_path: Path, fake: Fake) -> None:
    done = run(make_spec(tmp_path, fake.url, [f"{letter}!400=" for letter in "abcdefghijklmnopqrstuvwxyz"]))
    assert done.code == 1
    assert "the engine rejects every prompt: HTTP 400: the prompt is too long" in done.stderr.splitlines()[-1]
    few = tmp_path / "few"
    few.mkdir()
    spec = make_spec(few, fake.url, ["a!400="])
    # The second start finds the failed group of the first in its file.
    for _ in range(2):
        done = run(spec)
        assert done.code == 1 and "rejected every prompt" in done.stderr.splitlines()[-1]


def test_a_second_start_rolls_out_again_what_the_first_could_not_score(tmp_path: Path, fake: Fake) -> None:
    mended = tmp_path / "mended"
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def mine(prompt, response, answer, metadata):\n"
        f"    if 'd' in prompt and not os.path.exists({str(mended)!r}):\n"
        "        raise ValueError('out of order')\n"
        "    return 0.5\n"
    )
    spec = make_spec(tmp_path, fake.url, ["ba=", "dc="], **{"reward.kind": f"{tmp_path}/mine.py:mine"})
    assert run(spec).code == 1
    part = tmp_path / "trajectories" / "part"
    mended.touch()
    done = run(spec)
    resumed = done.result["resumed_groups"]
    assert done.code == 0 and done.result["tasks"] in ([0, 1], [1, 0]) and resumed <= 1
    assert (done.result["trajectories"], done.result["reward_mean"]) == (2 * SAMPLES, 0.5)
    assert sorted(group.task_index for group in scan_rank_file(part).groups) == [0, 1]
    for read in (load(part)["trajectories"], [*iter_trajectories(part)]):
        assert [one["valid"] for one in read] == [True] * 2 * SAMPLES
    merged = merge(
        MergeRequest(out=tmp_path / "merged.pt", parts=(Part(part),), expected=(0, 1), metadata={})
    )
    assert (merged.trajectories, merged.duplicates_dropped, merged.unjudged) == (2 * SAMPLES, 0, 0)


def test_an_engine_that_is_not_there_is_one_line(tmp_path: Path, fake: Fake) -> None:
    spec = make_spec(tmp_path, fake.url, ["ba="], **{"engine.start_timeout_s": 0.1})
    fake.process.kill()
    fake.process.wait()
    done = run(spec)
    assert done.code == 1
    assert_one_line(done.stderr, f"the engine at {fake.url} does not answer", "ConnectError", "(4 tries)")


def test_a_server_that_gives_no_token_ids_is_one_line(tmp_path: Path) -> None:
    server = start_fake(tmp_path / "other", ids=False)
    try:
        done = run(make_spec(tmp_path, server.url, ["ba="]))
    finally:
        server.process.kill()
        server.process.communicate()
    assert done.code == 1
    assert_one_line(done.stderr, "does not return token ids and log-probabilities")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_whole_groups_and_a_second_start_does_the_rest(
    tmp_path: Path, fake: Fake, number: signal.Signals
) -> None:
    prompts = ["ba=", "dc=", "fe!gate=", "hg!gate="]
    spec = make_spec(tmp_path, fake.url, prompts)
    process = start(spec)
    part = tmp_path / "trajectories" / "part"
    # The two others are on disk, and one is at the gate.
    at_gate = fake.folder / "at-gate"
    until(lambda: at_gate.exists() and groups_in(part) == 2, lives=lambda: process.poll() is None)
    process.send_signal(number)
    done = finish(process, spec)
    assert done.code == (-9 if number == signal.SIGKILL else 128 + number)
    assert (done.result, done.stderr) == ({}, "")
    scan = scan_rank_file(part)
    assert {group.task_index for group in scan.groups} == {0, 1} and not scan.finished
    assert not (tmp_path / "trajectories" / "checkpoint").exists()

    (fake.folder / "gate").touch()
    again = run(spec)
    assert again.code == 0 and again.result["groups"] == 4 and again.result["resumed_groups"] == 2
    assert [request["prompt"] for request in fake.requests()] == [prompts, prompts[2:]]
    assert all(len(group) == SAMPLES for group in rolled_out(tmp_path).values())
    once_more = run(spec)  # between the file's end and the result
    assert once_more.code == 0 and once_more.result["resumed_groups"] == 4 and len(fake.requests()) == 2


def test_what_another_has_not_begun_is_taken_over(tmp_path: Path, fake: Fake) -> None:
    prompts = [f"{letter}a=" for letter in "abcdef"]
    shares = {"shares": {"1": [2, 3, 4, 5], "2": [0, 1]}}
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "lot-0001-000000").write_text("1 1\n")
    done = run(make_spec(tmp_path, fake.url, prompts, **shares))
    assert done.code == 0 and sorted(done.result["tasks"]) == [0, 1, 3, 4, 5] == sorted(rolled_out(tmp_path))
    assert (done.result["taken_over"], done.result["claims"], done.result["ended_early"]) == (3, 5, False)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["done"] == progress["total"] == 5 * SAMPLES
    assert scan_rank_file(tmp_path / "trajectories" / "part").header["expected"] == list(range(6))


def test_what_would_only_wait_in_the_engine_is_left_for_others(tmp_path: Path, fake: Fake) -> None:
    prompts = [f"{number % 9}a!gate=" for number in range(12)]
    shares = {"shares": {"1": [], "2": list(range(12))}, "sampling": {"samples": 64}}
    spec = make_spec(tmp_path, fake.url, prompts, **shares)
    (fake.folder / "waiting").write_text("128.0")
    process = start(spec)
    looks, claims = fake.folder / "looks", tmp_path / "claims"
    until(
        lambda: looks.exists() and len(looks.read_text().split()) >= 3, lives=lambda: process.poll() is None
    )
    assert (
        len(os.listdir(claims)) == 4
    )  # 256 sequences, and not all 12 groups that rollout.concurrency allows
    (fake.folder / "waiting").write_text("0.0")
    (fake.folder / "gate").touch()
    done = finish(process, spec)
    assert done.code == 0 and done.result["groups"] == 12


def test_the_phase_ends_without_its_last_tasks(tmp_path: Path, fake: Fake) -> None:
    ends = {"completion_threshold": 0.6, "grace_s": 0.1}
    done = run(make_spec(tmp_path, fake.url, ["ba=", "dc=", "fe!gate="], **ends))
    assert done.code == 0, done.stderr
    assert (sorted(done.result["tasks"]), done.result["ended_early"]) == ([0, 1], True)
    assert scan_rank_file(tmp_path / "trajectories" / "checkpoint").finished
    assert (tmp_path / "claims" / "cut").exists()


def test_a_task_that_takes_too_long_is_accounted_for(tmp_path: Path, fake: Fake) -> None:
    seconds = round(4 * slowness())
    limit = {"rollout.task_timeout_s": float(seconds)}
    done = run(make_spec(tmp_path, fake.url, ["ba=", "dc=", "fe!gate="], **limit))
    assert done.code == 0
    assert_one_line(done.stderr, f"task 2: not finished within rollout.task_timeout_s={seconds}")
    assert (done.result["timed_out"], done.result["refused"], done.result["invalid"]) == (1, 0, SAMPLES)
    groups = rolled_out(tmp_path)
    assert [item["reward"] for item in groups[0] + groups[1]] == [1.0] * 2 * SAMPLES
    assert [(item["valid"], item["finish_reason"]) for item in groups[2]] == [(False, "error")] * SAMPLES


REWARD = """
def reward(prompt, response, answer, metadata):
    if "d" in response:
        raise ValueError("no\\nd please")
    return {"reward": 0.5, "length": len(response), "by": "me"}
"""


def test_a_reward_of_ones_own_and_its_failures(tmp_path: Path, fake: Fake) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    kind = {"reward.kind": f"{tmp_path / 'mine.py'}:reward"}
    done = run(make_spec(tmp_path, fake.url, [*("ab=" for _ in range(11)), "dc="], **kind))
    assert done.code == 0 and done.result["reward_errors"] == SAMPLES and done.result["invalid"] == SAMPLES
    groups = rolled_out(tmp_path)
    assert groups[0][0]["reward_parts"] == {"reward": 0.5, "length": 2.0}
    assert groups[0][0]["metadata"]["reward_info"] == {"by": "me"}
    assert [(item["valid"], item["reward"]) for item in groups[11]] == [(False, 0.0)] * SAMPLES
    assert groups[11][0]["metadata"]["reward_error"] == "reward: ValueError: no\nd please (mine.py, line 4)"
    # Those that could not be judged are no part of the mean.
    assert done.result["reward_mean"] == 0.5

    more = tmp_path / "more"
    more.mkdir()
    done = run(make_spec(more, fake.url, ["ab=", "dc=", "de="], **kind))
    assert done.code == 1
    last = done.stderr.splitlines()[-1]
    assert "the reward failed for " in last and "of 12 trajectories" in last
    assert "ValueError: no d please (mine.py, line 4)" in last
    # The log has the traceback, once.
    assert done.stderr.count("Traceback") == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"temperature": 0}}, "at temperature 0 would be identical"),
        ({"reward.kind": "none.py:f"}, "no such file: none.py"),
        ({"tasks": [0, 5], "shares": {"2": [0, 5]}}, "train.jsonl: has 1 tasks, so none with index 5"),
    ],
)
def test_what_the_user_must_mend_is_exit_code_2(
    tmp_path: Path, fake: Fake, changes: dict[str, Any], message: str
) -> None:
    done = run(make_spec(tmp_path, fake.url, ["ba="], **changes))
    assert done.code == 2
    assert_one_line(done.stderr, message)


def test_a_node_that_slept_leaves_its_finished_part_unpublished(tmp_path: Path, fake: Fake) -> None:
    """Its rank was started anew meanwhile: the public name belongs to what that start rolls out."""
    spec, generations = make_spec(tmp_path, fake.url, ["ba="]), RunPaths(tmp_path).generations
    generations.mkdir(parents=True)
    (generations / "gen-000004.json").write_text("")
    done = run(spec)
    assert done.code == 1 and "generation 3 has ended" in done.stderr
    part, public = (tmp_path / "trajectories" / name for name in ("part", "checkpoint"))
    assert scan_rank_file(part).finished and not public.exists()
    (generations / "gen-000004.json").rename(generations / "gen-000003.json")
    assert run(spec).code == 0 and scan_rank_file(public).finished


def test_short_answers_come_whole_and_are_the_same_trajectories(tmp_path: Path, fake: Fake) -> None:
    prompts = ["dcba=", "zyx!wrong=", "ba!long=", "feh!abort=", "gf!cut="]
    for name, most in (("streamed", 32), ("whole", 8)):
        (tmp_path / name).mkdir()
        for once in fake.folder.glob("once-*"):
            once.unlink()
        done = run(make_spec(tmp_path / name, fake.url, prompts, sampling={"max_tokens": most}))
        assert (done.code, done.stderr) == (0, "")
    streamed, whole = (rolled_out(tmp_path / name) for name in ("streamed", "whole"))
    for groups in (streamed, whole):
        for item in itertools.chain(*groups.values()):
            del item["timings"]
    assert streamed == whole and sorted(whole) == list(range(5))
    asked = [bool(request.get("stream")) for request in fake.requests()]
    # Each was asked again after the broken connection.
    assert asked == sorted(asked, reverse=True) and min(asked.count(True), asked.count(False)) >= 2
