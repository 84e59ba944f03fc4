"""What is this user's alone: folders, made while others clean up and refused where others may write; and the port that agents talk to."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from commands import typed
from other_user import UID, needs_root, start_as_other

from fsbarrier.data import demo_tasks
from fsbarrier.data.demo_tasks import FOLDER
from fsbarrier.errors import UsageError
from fsbarrier.processes.limits import SHARED_MEMORY
from fsbarrier.rundir import runrecord
from fsbarrier.store import files, trusted_folder
from fsbarrier.store.local_folders import PREFIX, SHORT_PLACE, remove_abandoned, scratch_dir, user_dir


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, made = tempfile.mkdtemp, list[str]()

    def mkdtemp(**where: object) -> str:
        made.append(real(**where))  # type: ignore[call-overload]
        if len(made) <= 2:
            shutil.rmtree(made[-1])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with scratch_dir(tmp_path, "mine") as folder:
        assert str(folder) == made[2] and folder.is_dir()
    assert os.listdir(tmp_path) == []


def test_what_nobody_holds_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}old-x").mkdir()
    (tmp_path / "other").mkdir()
    with scratch_dir(tmp_path, "a") as first, scratch_dir(tmp_path, "b") as second:
        assert sorted(os.listdir(tmp_path)) == sorted([first.name, second.name, "other"])


@needs_root
def test_another_users_is_left_alone_also_by_root(tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}theirs-x"
    theirs.mkdir()
    os.chown(theirs, UID, UID)
    remove_abandoned(tmp_path)
    assert theirs.is_dir()


def test_no_link_is_followed_to_what_is_removed(tmp_path: Path) -> None:
    precious, run = tmp_path / "precious", tmp_path / "run"
    (precious / "letters").mkdir(parents=True)
    run.mkdir()
    (run / "old").symlink_to(precious)
    with pytest.raises(OSError, match="is a link"):
        files.remove(run / "old" / "letters", run)
    files.remove(run / "old", run)
    assert (precious / "letters").is_dir() and not os.path.lexists(run / "old")


# --- the user's own folder ------------------------------------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


def test_the_folder_is_in_the_temporary_directory_and_this_users_alone(temporary: Path) -> None:
    before = os.umask(0)
    try:
        folder = user_dir()
    finally:
        os.umask(before)
    assert folder == temporary / f"fsbarrier-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert user_dir() == folder


@needs_root
def test_what_another_user_has_put_there_is_named_and_not_used(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    (temporary / "fsbarrier-0").mkdir(parents=True)
    os.chown(temporary / "fsbarrier-0", UID, UID)
    with Cluster(tmp_path, 1, "--iterations", "1", program="ping", real=True) as cluster:
        cluster.env[0] = {"TMPDIR": str(temporary)}
        cluster.start()
        assert cluster.wait() == {0: 2}, cluster.said(0)
        said = cluster.said(0)
        assert f"{temporary}/fsbarrier-0 belongs to user id {UID}; remove it, or set TMPDIR" in said
    assert not list((temporary / "fsbarrier-0").iterdir())


def test_a_start_clears_away_the_folders_of_killed_daemons_wherever_they_lie(tmp_path: Path) -> None:
    """Also where it makes none itself: a folder for sockets, a copy of weights in memory."""
    places = [place for place in (SHORT_PLACE, SHARED_MEMORY) if os.access(place, os.W_OK)]
    left = [Path(tempfile.mkdtemp(prefix=PREFIX, dir=place)) for place in places]
    with Cluster(tmp_path, 1, "--iterations", "1", program="ping", real=True) as cluster:
        cluster.env[0] = {"TMPDIR": str(tmp_path)}
        cluster.start()
        assert cluster.wait() == {0: 0}, cluster.said(0)
    assert not [folder for folder in left if folder.exists()]


# --- where others may write -----------------------------------------------------------------------------------------------------

SOMEBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's files")

PROGRAM = """
import pathlib
pathlib.Path(__file__).with_name("ran").write_text("")
from fsbarrier.loader import load_program
PROGRAM = load_program("ping")
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of another user, with a program of his, that everybody may read."""
    place = tmp_path / "of-somebody"
    place.mkdir()
    (place / "mine.py").write_text(PROGRAM)
    words = [
        "run",
        "--program",
        str(place / "mine.py"),
        "--log-path",
        str(place / "run"),
        "--iterations",
        "1",
    ]
    typed(*words)
    (place / "mine.py").with_name("ran").unlink()
    for path in (place, *place.rglob("*")):
        os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    monkeypatch.chdir(tmp_path)
    return place


@needs_root
@pytest.mark.parametrize(
    "words",
    [
        ["run", "--worker", "1"],
        ["run", "--master", "--num-nodes", "2", "--iterations", "2"],
        ["run", "--dry-run"],
        ["launch", "local", "--nodes", "1"],
        ["recover", "--iteration", "1", "--dry-run"],
        ["recover", "--iteration", "1"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("flag", [[], ["--shared-group"]], ids=["alone", "shared"])
def test_another_users_run_is_refused_and_its_program_is_not_loaded(
    words: list[str], flag: list[str], foreign: Path
) -> None:
    # A damaged generation makes `recover` ask the program where to continue.
    (foreign / "run" / "coordination" / "generations" / "gen-000001.json").write_text("{")
    said = typed(*words, *flag, "--log-path", foreign / "run", code=2).err
    assert "belongs to nobody" in said and "could run code as you" in said and said.count("\n") == 1
    assert not (foreign / "ran").exists(), "the other user's program ran"


@needs_root
@pytest.mark.parametrize("record", [True, False], ids=["with a record", "empty"])
def test_a_run_directory_that_somebody_else_makes_during_the_start_is_refused(
    record: bool, foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder such as /tmp, everybody may make what is not there yet."""
    log_path, new = tmp_path / "run", runrecord.new

    def meanwhile(*args: object, **more: object) -> object:
        os.rename(foreign / "run", log_path)
        if not record:
            (log_path / "run.json").unlink()
        return new(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(runrecord, "new", meanwhile)
    said = typed("run", "--program", "ping", "--iterations", "1", "--log-path", log_path, code=2)
    assert "belongs to nobody" in said.err
    assert not (foreign / "ran").exists(), "the other user's program ran"


@needs_root
def test_another_users_pool_is_refused(foreign: Path) -> None:
    pool = foreign / "pool"
    pool.mkdir()
    os.chown(pool, SOMEBODY, SOMEBODY)
    for flag in ((), ("--shared-group",)):
        said = typed("daemon", pool, *flag, code=2)
        assert "belongs to nobody" in said.err and not list(pool.iterdir())
    for name in ("log", "logs", "runs", "coordination"):
        (pool / name).mkdir()
    for words in (["daemon", str(pool)], ["submit", str(pool), "--program", "ping"]):
        assert "belongs to nobody" in typed(*words, code=2).err


@needs_root
@pytest.mark.parametrize(
    ("change", "shared_group", "says"),
    [
        (lambda home: None, False, ""),
        (lambda home: None, False, "the link is somebody's"),
        (lambda home: home.chmod(0o777), False, "everybody may write"),
        (lambda home: home.chmod(0o777), True, "everybody may write"),
        (lambda home: home.chmod(0o1777), False, ""),
        # Its owner can rename what others made in it.
        (lambda home: (home.chmod(0o1777), os.chown(home, SOMEBODY, -1)), False, "belongs to nobody"),
        (lambda home: home.chmod(0o775), False, "--shared-group"),
        (lambda home: home.chmod(0o775), True, ""),
        (lambda home: (home.chmod(0o775), os.chown(home, -1, UID)), True, "only a group that you are in"),
        (lambda home: os.chown(home / "runs" / "one", SOMEBODY, -1), True, "belongs to nobody"),
        (lambda home: (home / "runs" / "one").chmod(0o1777), False, "everybody may write"),
        (lambda home: (home / "runs" / "one" / "coordination").chmod(0o770), False, "its group may write"),
    ],
)
def test_nobody_else_may_write_on_the_way(
    tmp_path: Path,
    change: Callable[[Path], object],
    shared_group: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever can rename a folder on the way can put another in the place of the run."""
    monkeypatch.setattr(os, "getgroups", lambda: [0, SOMEBODY])
    home = tmp_path / "home"
    (home / "runs" / "one" / "coordination").mkdir(parents=True)
    (tmp_path / "link").symlink_to(home / "runs")
    for folder in (home, *home.rglob("*")):
        # The user's own group would do no harm.
        os.chown(folder, -1, SOMEBODY)
    change(home)
    if "link" in says:
        os.chown(tmp_path / "link", SOMEBODY, SOMEBODY, follow_symlinks=False)
        with pytest.raises(UsageError, match="/link belongs to nobody"):
            trusted_folder.check(tmp_path / "link" / "one", shared_group=False, named="--log-path")
        return
    for folder in (home / "runs" / "one", tmp_path / "link" / "one"):
        try:
            trusted_folder.check(
                folder, shared_group=shared_group, named="--log-path", inside=["coordination", "run.json"]
            )
            said = ""
        except UsageError as error:
            said = str(error)
        assert (says in said) if says else not said


def test_a_run_gets_a_copy_of_the_demo_that_is_its_own(tmp_path: Path) -> None:
    target = tmp_path / "run" / "demo"
    for _ in range(2):
        demo_tasks.make(target)
        files = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
        assert files == {path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
        assert all((target / name).read_bytes() == (FOLDER / name).read_bytes() for name in files)
    assert target.stat().st_mode & 0o777 == 0o700
    assert (target / "train.jsonl").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in target.parent.iterdir()] == ["demo"]


# --- the port that agents talk to ----------------------------------------------------------------------------------------------

# Connects as another user, from each kind of socket and address, and says how each connection ended.
KNOCK = """
import socket, sys
for family, host, source in ((2, "127.0.0.1", ""), (2, "127.0.0.1", "127.0.0.9"), (10, "::ffff:127.0.0.1", "")):
    line = socket.socket(family)
    line.bind((source, 0))
    line.settimeout(20)
    try:
        line.connect((host, int(sys.argv[1])))
        line.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
        print("answered" if line.recv(9) else "closed")
    except ConnectionError:
        print("closed")
"""


@needs_root
def test_another_users_connections_to_the_agents_port_are_closed_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fsbarrier.rollouts.agent_http import Endpoint

    async def knock() -> tuple[str, str, list[bytes]]:
        endpoint = Endpoint()
        await endpoint.open()
        other = start_as_other(KNOCK, str(endpoint._port))
        said, errors = await asyncio.to_thread(other.communicate)
        own = []
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
            reader, writer = await asyncio.open_connection(host, endpoint._port, family=family)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            own.append(await reader.read(13))
            writer.close()
        await endpoint.close()
        return said, errors, own

    said, errors, own = asyncio.run(knock())
    assert said == "closed\n" * 3, errors
    assert own == [b"HTTP/1.1 401 "] * 2, "its own user is answered"
    assert "closed a connection of user id 64123 (from 127.0.0.1" in capsys.readouterr().out


# Connects from one port to many addresses of its own: the kernel lists the connections of one port in an order of its own.
CONNECTED = """
import socket
server, lines, port = socket.create_server(("", 0)), [], 0
for number in range(1, 100):
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    line.bind(("127.0.0.1", port))
    line.connect((f"127.0.0.{number}", server.getsockname()[1]))
    port = line.getsockname()[1]
    lines.append(line)
print(port, flush=True)
input()
"""


@needs_root
def test_a_connection_from_a_port_that_another_user_has_too_is_answered() -> None:
    """One local address may have connections of several users, to different places."""
    from fsbarrier.rollouts.agent_http import Endpoint

    other = start_as_other(CONNECTED)
    assert other.stdout is not None

    async def ask(port: int) -> bytes:
        endpoint = Endpoint()
        await endpoint.open()
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        line.bind(("127.0.0.1", port))
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", endpoint._port))
        reader, writer = await asyncio.open_connection(sock=line)
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        said = await reader.read(13)
        writer.close()
        await endpoint.close()
        return said

    try:
        assert asyncio.run(ask(int(other.stdout.readline()))) == b"HTTP/1.1 401 "
    finally:
        other.communicate("\n")
