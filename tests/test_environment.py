"""Environments: servers of a user's command, that refuse, die and do not start (environment_server.py)."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_rollout import SAMPLES, Fake, Run, make_spec, rolled_out, run

from fsbarrier.errors import UsageError
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import known_names
from fsbarrier.settings.sources import from_words

HERE = Path(__file__).parent
AGENT = HERE.parent / "phases" / "agents" / "openenv.py"


def rolled(
    folder: Path,
    fake: Fake,
    words: list[str],
    sessions: int = 3,
    tasks: Sequence[object] = (),
    **changes: Any,
) -> Run:
    command = [sys.executable, str(HERE / "environment_server.py"), "{port}", str(folder), str(sessions)]
    defaults = {
        "rollout.agent": f"{AGENT}:OpenEnv",
        "rollout.max_tokens": 16,
        "engine.max_model_len": 256,
        "environment.command": shlex.join(command),
        "environment.sessions_per_server": sessions,
    }
    spec = make_spec(folder, fake.url, [f"guess {word}=" for word in words], **{**defaults, **changes})
    tasks = tasks or [{"prompt": f"guess {word}=", "answer": word, "reset": {"word": word}} for word in words]
    (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return run(spec)


def test_episodes_wait_for_a_session_and_only_those_of_a_dead_server_are_begun_again(
    tmp_path: Path, fake: Fake
) -> None:
    words = ["ab", "crash", "cd", "ef"]
    done = rolled(tmp_path, fake, words, **{"environment.replicas": 2})
    assert (done.code, done.result["agent_errors"], done.result["environment_errors"]) == (0, 0, 0), done
    for task, group in rolled_out(tmp_path).items():
        assert [(item["valid"], item["reward"], item["text"]) for item in group] == [
            (True, 1.0, words[task])
        ] * SAMPLES
        assert all("".join(map(chr, item["token_ids"])).endswith(f"{words[task]}\x01") for item in group)
    (event,) = done.events
    assert event["event"] == "environment_ended" and event["why"].startswith("was ended by signal 9")
    assert event["log"][-1] == "the last words of the server"
    started = (tmp_path / "starts").read_text().split()
    # The other server's episodes are not begun again; the killed one had three at most.
    begun = (tmp_path / "sessions").read_text().split().count("1") - len(words) * SAMPLES
    assert 1 <= begun <= 3
    assert len(started) == 3 and not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_a_task_names_its_environment(tmp_path: Path, fake: Fake) -> None:
    """Two with names, and the one without; only that one's server ends whose episode says so."""
    words = ["crash", "ab", "cd"]
    names = ("one", "two", None)
    chosen: dict[str, Any] = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        command = [sys.executable, str(HERE / "environment_server.py"), "{port}", str(tmp_path / name), "2"]
        chosen |= {
            f"environments.{name}.command": shlex.join(command),
            f"environments.{name}.sessions_per_server": 2,
        }
    tasks = [
        {"prompt": f"guess {word}=", "reset": {"word": word}, "environment": name}
        for word, name in zip(words, names, strict=True)
    ]
    done = rolled(tmp_path, fake, words, tasks=tasks, **chosen)
    assert (done.code, done.result["agent_errors"], done.result["environment_errors"]) == (0, 0, 0), done
    rewards = [[one["reward"] for one in group] for group in rolled_out(tmp_path).values()]
    assert rewards == [[1.0] * SAMPLES] * 3
    (event,) = done.events
    assert event["environment"] == "environments.one"
    starts = [len((tmp_path / name / "starts").read_text().split()) for name in ("one", "two", "")]
    assert starts == [2, 1, 1]
    assert {path.name for path in tmp_path.glob("**/environment*.log")} == {
        *("environment.log", "environment_one.log", "environment_two.log")
    }


NEVER_READY = {"environment.restarts": 0, "environment.start_timeout_s": 0.2}
STARTS: list[tuple[dict[str, Any], str]] = [
    (
        {"environment.command": "sh -c 'echo no word of {port}; exit 7'", "environment.restarts": 1},
        "the environment ended with exit code 7",
    ),
    (
        {"environment.command": "sleep {port}", **NEVER_READY},
        "the environment did not answer within 0.2 s (environment.start_timeout_s)",
    ),
    (
        {"environment.health": "/health", **NEVER_READY, "environment.start_timeout_s": 2.0},
        "the environment did not answer within 2 s (environment.start_timeout_s)",
    ),
    (
        {"environment.command": "/no/such/program {port}"},
        "environment: cannot start '/no/such/program': No such file or directory",
    ),
]


@pytest.mark.parametrize(("changes", "said"), STARTS)
def test_an_environment_that_does_not_start_ends_the_phase(
    tmp_path: Path, fake: Fake, changes: dict[str, Any], said: str
) -> None:
    done = rolled(tmp_path, fake, ["ab"], **changes)
    assert done.code == 1 and said in done.stderr
    *_, last = done.stderr.splitlines()
    assert said in last
    if "echo" in changes.get("environment.command", ""):
        assert "environment.log): no word of " in last


def test_an_agent_that_asks_for_an_environment_that_it_has_not_is_told_so(tmp_path: Path, fake: Fake) -> None:
    done = rolled(tmp_path, fake, ["ab"], **{"environment.command": None})
    assert done.code == 1 and "the episode has no environment: give environment.command" in done.stderr


def test_an_environment_without_an_agent_or_a_port_is_refused() -> None:
    for words, said in (
        (("environments.web.sessions=3",), "environments.web: needs a command"),
        (("environments.web.command=a", "rollout.agent=a.py:A"), "environments.web.command=a: needs {port}"),
        (("environment.command=a {port}",), "environment.command=a {port}: is for the episodes of an agent"),
        (("environment.command=a", "rollout.agent=a.py:A"), "environment.command=a: needs {port}"),
        (
            ("environment.command=a {port}", "environment.health=up", "rollout.agent=a.py:A"),
            "environment.health=up: must begin with /",
        ),
    ):
        with pytest.raises(UsageError, match=said.replace("{", "\\{")):
            resolve(from_words(words, known_names()))
