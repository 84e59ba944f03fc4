"""`fsbarrier view`: who may open the page, what it leaves behind, and wrong command lines. No browser."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import REPO
from commands import typed
from fake_run import long_run
from other_user import needs_root, start_as_other
from view_server import Viewer, asked, cookie_of, viewing
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=websocket"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, and the folder from which the command is typed."""
    made = tmp_path_factory.mktemp("view")
    long_run(made / "runs" / "first", 3, lose_at=None)
    long_run(made / "runs" / "second", 2, lose_at=None)
    (made / "typed here").mkdir()
    return made


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Iterator[Viewer]:
    with viewing(folder / "runs", cwd=folder / "typed here") as started:
        yield started


def test_it_says_how_to_open_the_page_here_and_from_elsewhere(viewer: Viewer, folder: Path) -> None:
    said = "".join(viewer.said)
    assert str(folder / "runs") in said
    assert f"ssh -L {viewer.port}:127.0.0.1:{viewer.port} " in said and "Ctrl-C" in said


@pytest.mark.parametrize(
    "path",
    ["/", "/run/first/now", "/favicon.ico", "/nowhere", "/_nicegui_ws/socket.io/?EIO=4&transport=polling"],
)
def test_nothing_is_answered_without_the_key(viewer: Viewer, path: str) -> None:
    for headers in (
        {},
        {"Cookie": f"{cookie_of(viewer).partition('=')[0]}=wrong"},
        {"Authorization": "Bearer x"},
    ):
        status, _, text = asked(f"{viewer.base}{path}", headers)
        assert status == 403 and "first" not in text, (path, headers)
    wrong = "&" if "?" in path else "?"
    assert asked(f"{viewer.base}{path}{wrong}key=wrong")[0] == 403


def test_the_address_gives_a_cookie_and_hides_the_key(viewer: Viewer) -> None:
    key = viewer.address.partition("key=")[2]
    status, headers, _ = asked(f"{viewer.base}/run/first/now?x=1&key={key}")
    assert status == 303 and headers["location"] == "/run/first/now?x=1"
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    # An address that a browser would take for another host's.
    assert asked(f"{viewer.base}//elsewhere/?key={key}")[1]["location"] == "/elsewhere/"
    status, headers, text = asked(f"{viewer.base}/run/first/now", {"Cookie": cookie_of(viewer)})
    assert status == 200 and "iteration 3" in text and key not in text
    assert headers["content-security-policy"].startswith("default-src 'self'")


def test_a_socket_needs_the_key_and_comes_from_the_page_itself(viewer: Viewer) -> None:
    address = f"ws{viewer.base.removeprefix('http')}{SOCKET}"

    async def opens(headers: dict[str, str], origin: str | None) -> bool:
        try:
            async with connect(address, additional_headers=headers, origin=origin, proxy=None) as opened:  # type: ignore[arg-type]
                return str(await opened.recv()).startswith("0{")
        except InvalidStatus as refused:
            assert refused.response.status_code == 403
            return False

    cookie = {"Cookie": cookie_of(viewer)}
    assert asyncio.run(opens(cookie, viewer.base))
    assert not asyncio.run(opens({}, viewer.base))
    # The page of another server on this host, to which the browser sends the same cookies.
    assert not asyncio.run(opens(cookie, "http://127.0.0.1:1"))
    assert asked(f"{viewer.base}/", {**cookie, "Origin": "http://evil.example"})[0] == 403


@needs_root
def test_another_user_of_the_machine_gets_nothing_even_with_the_key(viewer: Viewer) -> None:
    code = (
        "import sys, urllib.request\ntry:\n    print(urllib.request.urlopen(sys.argv[1], timeout=60).status)\n"
        "except OSError as error:\n    print('refused', error)"
    )
    other = start_as_other(code, viewer.address)
    out, err = other.communicate(timeout=120)
    assert out.startswith("refused"), (out, err)


def test_names_in_addresses_are_runs_of_the_folder_and_nothing_else(viewer: Viewer, folder: Path) -> None:
    cookie = {"Cookie": cookie_of(viewer)}
    for path in ("/run/third/now", "/run/..%2Fruns%2Ffirst/now", "/run/%2Fetc/now", "/run/first/nothing"):
        status, _, text = asked(f"{viewer.base}{path}", cookie)
        assert status == 404 or "There is no such" in text, path
        assert str(folder) not in text


def test_it_only_reads_and_ends_by_ctrl_c(folder: Path) -> None:
    def everything() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}

    before = everything()
    with viewing("--log-path", folder / "runs" / "first", cwd=folder / "typed here") as viewer:
        cookie = {"Cookie": cookie_of(viewer)}
        assert "first" in asked(f"{viewer.base}/run/first/now", cookie)[2]
        # Only this run is shown.
        assert "There is no such run" in asked(f"{viewer.base}/run/second/now", cookie)[2]
        code, rest = viewer.end()
    assert (code, rest) == (130, "") and everything() == before
    with viewing(folder / "runs" / "first") as viewer:
        assert viewer.end(signal.SIGTERM)[0] in (143, -signal.SIGTERM)


def test_wrong_command_lines_are_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = typed("view", folder / "runs", "--port", port, code=2).err
        assert f"--port {port}: cannot listen there" in said and "free one" in said
    assert "at most 65535" in typed("view", folder / "runs", "--port", 70000, code=2).err
    assert "there is no such folder" in typed("view", folder / "nowhere", code=2).err
    assert "`fsbarrier view FOLDER`" in typed("view", "--log-path", folder / "runs", code=2).err
    assert "name one of them" in typed("view", folder, "--log-path", folder / "runs" / "first", code=2).err
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "nicegui" else found(name))
    said = typed("view", folder / "runs", code=2).err
    assert said == (
        "fsbarrier: error: view: this environment lacks nicegui, which makes the page; type: pip install 'fsbarrier[view]'\n"
    )
    assert os.environ.get("NICEGUI_STORAGE_PATH") is None


# --- the same in a terminal ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two iterations with answers, hostile ones among them, as scripts/lab/big_run.py writes it."""
    folder = tmp_path_factory.mktemp("answers") / "run"
    argv = [sys.executable, str(REPO / "scripts" / "lab" / "big_run.py"), str(folder)]
    subprocess.run([*argv, "--iterations", "2", "--nodes", "3", "--trajectories", "128"], check=True)
    return folder


def heads(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("=== ")]


def test_answers_page_through_a_terminal_with_the_same_filters(answered: Path) -> None:
    everything = heads(typed("logs", answered, "--answers").out)
    assert len(everything) == 64 and all("train iteration 2" in head for head in everything)
    rewards = [float(head.split()[2]) for head in everything if "not scored" not in head]
    assert rewards == sorted(rewards) and len(rewards) == 63

    def of(*filters: str, order: str = "worst") -> list[str]:
        words = [word for one in filters for word in ("--filter", one)]
        return heads(typed("logs", answered, "--answers", "--order", order, *words).out)

    assert {head.split(" · ")[1] for head in of("task=t3")} == {"task t3"} and len(of("task=t3")) == 8
    assert len(of("iteration=all", "split=train")) == 128 and len(of("iteration=1")) == 64
    assert [*map(len, (of("failed=yes"), of("cut_off=no")))] == [
        1,
        len([h for h in everything if "cut off" not in h]),
    ]
    assert 0 < len(of("reward_from=0.9")) == 63 - len(of("reward_to=0.8999"))
    assert len(of("length_from=100")) + len(of("length_to=99")) == 64
    assert (
        len(of("node=0")) == 24
        and of("node=9") == []
        and len(of("version=1")) == 64
        and of("set=other") == []
    )
    assert len(of("words=QUESTION 6:")) == 8
    longest = [int(head.split(" tokens")[0].rpartition(" ")[2]) for head in of(order="longest")]
    assert longest == sorted(longest, reverse=True)
    assert {order: len(of(order=order)) for order in ("best", "newest", "shortest", "task")} == dict.fromkeys(
        ("best", "newest", "shortest", "task"), 64
    )


def test_hostile_answers_are_shown_in_a_terminal_as_what_they_are(answered: Path) -> None:
    said = typed("logs", answered, "--answers", "--filter", "split=train").out
    assert "\x1b" not in said and "\u202e" not in said and "\ud800" not in said
    assert "\\x1b" in said or "no message" in said
    assert "not scored" in said and "ZeroDivisionError" in said


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--answers", "--filter", "rewards=1"], "rewards: is no filter"),
        (["--answers", "--filter", "task"], "--filter task: must be NAME=VALUE"),
        (["--answers", "--filter", "iteration=two"], "iteration: must be a whole number, got 'two'"),
        (["--answers", "--filter", "reward_to=low"], "reward_to: must be a number, got 'low'"),
        (["--answers", "--filter", "split=both"], "split: must be train or test, got 'both'"),
        (["--answers", "--filter", "failed=maybe"], "failed: must be yes or no, got 'maybe'"),
        (["--answers", "--order", "random"], "--order random: must be one of newest, worst"),
        (["--filter", "task=t1"], "--filter: is for --answers"),
    ],
)
def test_a_wrong_filter_is_one_line(answered: Path, words: list[str], wanted: str) -> None:
    assert wanted in typed("logs", answered, *words, code=2).err
