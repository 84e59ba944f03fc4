"""`fsbarrier launch ssh | slurm | kubernetes | skypilot | dstack`: what they write, and nodes started through a connection.

The everyday tests put a small program in the place of ssh: it runs, on this machine, the text that ssh would hand to the other one.
The slow ones use a real sshd and a real Slurm where they are installed.
"""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from cluster import leftovers
from commands import typed
from waiting import DEADLINE_S, free_port, until

from fsbarrier.rundir.journal import read_events

REPO = Path(__file__).resolve().parent.parent
FSBARRIER = f"env PYTHONPATH={REPO} {sys.executable} -m fsbarrier"
FAST = ("coordination.beat_s=0.2", "coordination.dead_s=10")
IN_CONTAINERS = ("--nodes", "2", "--image", "ghcr.io/me/fsbarrier:1", "--volume", "claim")


# --- ssh ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def connection(tmp_path: Path) -> str:
    """A stand-in for ssh: `OPTIONS HOST TEXT`, where the host `down` does not answer."""
    path = tmp_path / "ssh"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, sys\n"
        "host, text = sys.argv[-2:]\n"
        "if host == 'down':\n"
        "    print('no route to it')\n"
        "    sys.exit(255)\n"
        "if host[:4] == 'exit':\n"
        "    print('fsbarrier: connected')\n"
        "    sys.exit(int(host[4:]))\n"
        "os.execv('/bin/sh', ['sh', '-c', text])\n"
    )
    path.chmod(0o755)
    return str(path)


class Launched:
    """A `launch ssh` of the ping program under way."""

    def __init__(self, folder: Path, ssh: str, hosts: str, *words: str) -> None:
        self.log_path = folder / "run"
        argv = [sys.executable, "-m", "fsbarrier", "launch", "ssh", "--hosts", hosts, "--ssh", ssh]
        argv += [
            "--fsbarrier",
            FSBARRIER,
            "--program",
            "ping",
            "--log-path",
            str(self.log_path),
            *FAST,
            *words,
        ]
        environ = {name: value for name, value in os.environ.items() if "RANK" not in name}
        self.process = subprocess.Popen(
            argv,
            cwd=folder,
            env={**environ, "PYTHONPATH": str(REPO)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_until_at_work(self) -> None:
        def at_work() -> bool:
            assert self.process.poll() is None, self.process.communicate()[0]
            return any(event.name == "iteration_finished" for event in read_events(self.log_path))

        until(at_work)

    def end(self) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    started: list[Launched] = []

    def start(ssh: str, hosts: str, *words: str) -> Launched:
        started.append(Launched(tmp_path, ssh, hosts, *words))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def test_nodes_run_through_connections_and_their_output_comes_back(
    tmp_path: Path, connection: str, launched: Callable[..., Launched]
) -> None:
    code, out = launched(connection, "a,me@b", "--iterations", "2", "--logs", "came back").end()
    assert code == 0, out
    assert "2 nodes on a, me@b" in out and "the run ended: 2 iterations are done" in out
    logs = tmp_path / "came back"
    assert sorted(path.name for path in logs.iterdir()) == ["node_0.log", "node_1.log"]
    assert (
        "node 1 joined" in (logs / "node_1.log").read_text()
        or "iteration 2" in (logs / "node_1.log").read_text()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_nodes_end_with_the_launcher(
    connection: str, launched: Callable[..., Launched], number: int
) -> None:
    run = launched(connection, "a,b")
    run.wait_until_at_work()
    run.process.send_signal(number)
    code, out = run.end()
    assert code == (130 if number == signal.SIGINT else -number), out
    until(lambda: not leftovers(run.log_path))


def test_a_host_that_does_not_answer_ends_the_start_at_once(
    connection: str, launched: Callable[..., Launched]
) -> None:
    run = launched(connection, "a,down")
    code, out = run.end()
    assert code == 2 and "node 1 on down: ssh could not connect: no route to it" in out
    until(lambda: not leftovers(run.log_path))


def test_a_mistake_that_only_a_node_finds_ends_the_others(
    connection: str, launched: Callable[..., Launched]
) -> None:
    code, out = launched(connection, "a,b", "--data-path", "/nowhere", "--program", "rl").end()
    assert code == 2 and "node 0 on a: ended with exit code 2: fsbarrier: error:" in out


def test_a_node_that_fails_before_they_begin_ends_the_others(
    tmp_path: Path, connection: str, launched: Callable[..., Launched]
) -> None:
    in_the_way = tmp_path / "run" / "logs" / "attempt_1" / "node_1"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    run = launched(connection, "a,b")
    code, out = run.end()
    assert code == 3 and "node 1 on b: ended with exit code 3: fsbarrier: error: cannot join the run" in out
    until(lambda: not leftovers(run.log_path))


def test_a_node_that_is_killed_later_ends_nobody(connection: str, launched: Callable[..., Launched]) -> None:
    run = launched(connection, "a,b")
    run.wait_until_at_work()
    joined = {e.node_rank: e.integer("pid") for e in read_events(run.log_path) if e.name == "node_joined"}
    os.kill(joined[1], signal.SIGKILL)

    def alone() -> bool:
        assert run.process.poll() is None, run.process.communicate()[0]
        return any(e.name == "generation_started" and e.generation == 2 for e in read_events(run.log_path))

    until(alone)


# --- files --------------------------------------------------------------------------------------------------------------


def text_of(*words: str) -> str:
    return typed("launch", *words, "--dry-run").out


def test_a_file_of_the_users_own_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("launch", "kubernetes", *IN_CONTAINERS, "--log-path", "/shared/run", "--name", "train")
    typed(*words)
    (written,) = tmp_path.iterdir()
    typed(*words)  # its own file is written again
    whole = written.read_text()
    written.write_text(whole.replace("values: [2, 4, 5]", "values: [2]"))
    assert "was changed by hand since fsbarrier wrote it" in typed(*words, code=2).err
    assert "values: [2]" in written.read_text()
    written.write_text("mine\n")
    assert "was not written by fsbarrier" in typed(*words, code=2).err
    assert written.read_text() == "mine\n"


def test_a_slurm_job_keeps_every_word_and_asks_for_the_queue_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, tools, said = tmp_path / "it's here", tmp_path / "tools", tmp_path / "said"
    folder.mkdir()
    tools.mkdir()
    os.mkfifo(tmp_path / "never")
    # Programs that stand for Slurm's: the step ends when it is asked to stop.
    for name, does in {
        "sbatch": "echo '17;cluster'",
        "srun": f"echo $$ > {tmp_path}/step; while [ ! -e {tmp_path}/stop ]; do read -t 0.05 x < {tmp_path}/never; done",
        "fsbarrier": f"touch {tmp_path}/stop",
        "scontrol": ":",
    }.items():
        (tools / name).write_text(
            f'#!/usr/bin/env bash\nexec 4<>{tmp_path}/never\nprintf "%s\\n" {name} "$@" >> {said}.{name}\n{does}\n'
        )
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.chdir(folder)
    setting, log_path = "reward.kind=my file.py:judge; touch x", str(folder / "run")
    words = ["--nodes", "3", "--gpus-per-node", "8", "--time", "1:00:00", "--log-path", log_path]
    words += ["--sbatch=--partition=gpu", "--fsbarrier", "fsbarrier", "--program", "toy", "--resume", setting]
    words += ["--warn", "90"]
    out = typed("launch", "slurm", *words).out
    assert "as Slurm job 17, 3 nodes" in out and f"{folder}/fsbarrier-17.log" in out and "scancel 17" in out
    assert shlex.join(["fsbarrier", "status", "--log-path", log_path]) in out
    with subprocess.Popen(["bash", str(folder / "fsbarrier.sbatch")], cwd=tmp_path) as process:
        until((tmp_path / "step").exists)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(DEADLINE_S) == 0
    # A step that fails is the job's failure; one of its nodes that fails is not.
    (tools / "srun").write_text("#!/bin/sh\nexit 4\n")
    assert subprocess.run(["bash", str(folder / "fsbarrier.sbatch")], cwd=tmp_path).returncode == 4
    step = Path(f"{said}.srun").read_text().splitlines()
    assert {"--kill-on-bad-exit=0", "--no-kill"} <= set(step)
    assert {setting, "--resume"} <= set(step) and "--label" in step[: step.index("fsbarrier")]
    assert Path(f"{said}.fsbarrier").read_text().splitlines() == ["fsbarrier", "stop", "--log-path", log_path]
    assert Path(f"{said}.scontrol").read_text().split() == ["scontrol", "requeue", "17"]
    # Options count only before the first command.
    lines = (folder / "fsbarrier.sbatch").read_text().splitlines()
    options = list(itertools.takewhile(lambda line: line.startswith("#SBATCH"), lines[1:]))
    assert {
        "#SBATCH --time=1:00:00",
        "#SBATCH --nodes=3",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=gpu",
    } <= set(options)
    assert "#SBATCH --signal=B:USR1@90" in options and "#SBATCH --requeue" in options


@pytest.mark.parametrize(
    ("place", "more", "has"),
    [
        ("kubernetes", (), ["completions: 2", "completionMode: Indexed", 'claimName: "claim"']),
        ("skypilot", ("--accelerator", "H100"), ["num_nodes: 2", 'accelerators: "H100:8"']),
        ("dstack", (), ["nodes: 2", "gpu: 8", '- "claim:/shared"']),
    ],
)
def test_files_for_containers_have_all_words_as_typed(
    place: str, more: tuple[str, ...], has: list[str]
) -> None:
    setting = 'reward.kind=a b.py:$$(judge) $(x) "x"\nsetup: touch x\n- &a !!python/object *a\'{{ y }} ${{ run.args }} #\t\x85 \U0001f600'
    words = (*IN_CONTAINERS, "--log-path", "/shared/run", "--gpus-per-node", "8", *more)
    text = text_of(place, *words, setting)
    for each in has:
        assert each in text
    written = yaml.safe_load(text)
    # Kubernetes would put a variable in the place of $(NAME), dstack in that of ${{ NAME }}. Both make $ of $$.
    if place == "kubernetes":
        found = written["spec"]["template"]["spec"]["containers"][0]["args"][-1]
        # A node that cannot go on does not end the others.
        (container,) = written["spec"]["template"]["spec"]["containers"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
        assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/shared", "/dev/shm"]
        assert (written["spec"]["parallelism"], written["spec"]["completions"]) == (2, 2)
        assert {rule["action"] for rule in written["spec"]["podFailurePolicy"]["rules"]} == {"FailIndex"}
    else:
        found = shlex.split(written["run"] if place == "skypilot" else written["commands"][0])[-1]
    doubled = place != "skypilot"
    assert (found.replace("$$", "$") if doubled else found) == setting and "setup" not in written
    assert not doubled or found.count("$") == 2 * found.count("$$")


def test_the_volume_of_containers_is_where_the_user_mounts_it() -> None:
    text = text_of("kubernetes", *IN_CONTAINERS, "--mount", "/data", "--log-path", "/data/run")
    assert 'mountPath: "/data"' in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mars"], "`local`, `ssh`, `slurm`"),
        (["slurm"], "give --num-nodes N"),
        (["slurm", "--nodes", "none"], "--num-nodes none: must be a whole number, 1 or more"),
        (["slurm", "--nodes", "2", "--hosts", "a"], "--hosts: only valid with launch ssh"),
        (["slurm", "--nodes", "2", "--sbatch=--x\n#SBATCH y"], "--sbatch"),
        (["slurm", "--nodes", "2", "--name", "My Job"], "--name My Job: use at most 50 lower-case"),
        (
            ["dstack", *IN_CONTAINERS, "--log-path", "/shared/r", "--name", "a" * 42],
            "dstack takes names of 2 to 41",
        ),
        (
            ["dstack", *IN_CONTAINERS, "--log-path", "/shared/r", "--name", "a"],
            "dstack takes names of 2 to 41",
        ),
        (
            ["slurm", "--nodes", "2", "--env", "KEY=hunter2"],
            "--env KEY=...: name a variable, without its value",
        ),
        (
            ["kubernetes", *IN_CONTAINERS, "--log-path", "/shared/run", "--fs-group", "5"],
            "--fs-group 5: lets this group write to the volume; give --shared-group too",
        ),
        (["slurm", "--nodes", "2", "rollout.temprature=1"], "rollout.temperature"),
        (["ssh"], "give --hosts a,b,c"),
        (["ssh", "--hosts", "a,-oProxyCommand=x"], "is not a valid host"),
        (["ssh", "--hosts", "a,me@-oProxyCommand=x"], "is not a valid host"),
        (["ssh", "--hosts", "a,b;touch${IFS}x"], "is not a valid host"),
        (["ssh", "--hosts", "$(touch x)"], "is not a valid host"),
        (
            ["ssh", "--hosts", "a", "custom.secret.key=hunter2"],
            "custom.secret.key=*** would be visible to other users",
        ),
        (
            ["slurm", "--nodes", "2", "judge.url=https://me:hunter2@j"],
            "judge.url=https://me:***@j would be visible",
        ),
        (["ssh", "--hosts", "a,b", "--nodes", "3"], "--num-nodes 3 contradicts the 2 hosts listed"),
        (["ssh", "--hosts", "a", "--nodes", "3"], "--num-nodes 3 contradicts the 1 host listed"),
        (["ssh", "--hosts", "a", "--ssh", "ssh 'x"], "--ssh ssh 'x: No closing quotation"),
        (["kubernetes", "--nodes", "2"], "launch kubernetes: give --image"),
        (["dstack", *IN_CONTAINERS, "--log-path", "/home/run"], "must be below /shared"),
        (
            ["skypilot", *IN_CONTAINERS, "--log-path", "/shared/run", "--gpus-per-node", "8"],
            "--gpus-per-node needs --accelerator",
        ),
    ],
)
def test_mistakes_are_one_line(words: list[str], says: str) -> None:
    captured = typed("launch", *words, "--dry-run", code=2)
    assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err
    assert "hunter2" not in captured.err


def test_keys_reach_the_nodes_and_no_file(
    tmp_path: Path, connection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scheduler takes them its own way; through ssh they go where no process list shows them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "hunter2 'x' $y")
    monkeypatch.delenv("OTHER_KEY", raising=False)
    keys = ("--env", "WANDB_API_KEY", "--env", "OTHER_KEY", "tracker.names=wandb")
    words = (*IN_CONTAINERS, "--log-path", "/shared/run", *keys)
    task = yaml.safe_load(text_of("dstack", *words))
    assert task["env"] == ["WANDB_API_KEY", "OTHER_KEY"] and task["resources"] == {"shm_size": "16GB"}
    text = text_of("skypilot", *words)
    assert "sky launch --secret WANDB_API_KEY --secret OTHER_KEY FILE" in text
    assert yaml.safe_load(text)["secrets"] == {"WANDB_API_KEY": None, "OTHER_KEY": None}
    text = text_of("kubernetes", *words, "--fs-group", "1234", "--shared-group", "--name", "math")
    assert "kubectl create secret generic math-env --from-env-file=KEYS" in text
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == 1234
    assert pod["containers"][0]["env"][0] == {
        "name": "WANDB_API_KEY",
        "valueFrom": {"secretKeyRef": {"name": "math-env", "key": "WANDB_API_KEY"}},
    }
    slurm = text_of("slurm", "--nodes", "2", *keys)
    assert "#SBATCH --export=ALL,WANDB_API_KEY,OTHER_KEY\n" in slurm
    (tmp_path / "node").write_text('#!/bin/sh\nprintf "%s" "$WANDB_API_KEY" > "got$NODE_RANK"\n')
    (tmp_path / "node").chmod(0o700)
    ssh = ("launch", "ssh", "--hosts", "a,b", "--ssh", connection, "--fsbarrier", str(tmp_path / "node"))
    typed(*ssh, "--env", "WANDB_API_KEY")
    assert [(tmp_path / f"got{rank}").read_text() for rank in (0, 1)] == ["hunter2 'x' $y"] * 2
    assert "--env OTHER_KEY: is not set here" in typed(*ssh, "--env", "OTHER_KEY", code=2).err
    said = typed("launch", "dstack", *IN_CONTAINERS, "--log-path", "/shared/run", "tracker.names=wandb").err
    assert "the nodes get it from here with --env WANDB_API_KEY" in said
    monkeypatch.setenv("OTHER_KEY", "two\nlines")
    assert "has several lines" in typed(*ssh, "--env", "OTHER_KEY", code=2).err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("got")]
    assert files and not [path for path in files if b"hunter2" in path.read_bytes()]


def test_each_host_gets_its_rank() -> None:
    words = shlex.split(text_of("ssh", "--hosts", "gpu-a, me@gpu-b"))
    scripts = {words[at - 1]: word for at, word in enumerate(words) if "NODE_RANK=" in word}
    assert [*scripts] == ["gpu-a", "me@gpu-b"]
    for rank, script in enumerate(scripts.values()):
        assert f"NODE_RANK={rank} NNODES=2" in script


def test_a_node_ends_when_its_connection_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder of the launch: what sshd would run, without a guard around it."""
    (tmp_path / "node").write_text("#!/bin/sh\ntrap 'exit 7' TERM\npwd -P\nwhile :; do sleep 0.01; done\n")
    (tmp_path / "node").chmod(0o700)
    monkeypatch.chdir(tmp_path)
    command = text_of("ssh", "--hosts", "a", "--fsbarrier", str(tmp_path / "node"))
    argv = ["sh", "-c", shlex.split(command)[-1]]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdin is not None and process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(2)]
        assert said == ["fsbarrier: connected", str(tmp_path.resolve())]
        process.stdin.close()
        try:
            assert process.wait(DEADLINE_S) == 7
        finally:
            process.kill()


def test_of_several_exit_codes_the_nearest_to_the_cause_counts(
    connection: str, launched: Callable[..., Launched]
) -> None:
    """Too few nodes are left because the other ones' programs failed."""
    code, out = launched(connection, "exit5,exit4,exit5").end()
    assert code == 4, out


def test_a_clone_is_started_by_its_own_script_and_keeps_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the user is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FSBARRIER_VENV", raising=False)
    for words in (("ssh", "--hosts", "a"), ("slurm", "--nodes", "2")):
        text = text_of(*words)
        assert f"{REPO}/run.sh " in text and f"--log-path {REPO}/runs/default" in text


# --- the real ones ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A real sshd on loopback, and the ssh command that reaches it as the hosts a, b and c."""
    found = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None or shutil.which("ssh") is None:
        pytest.skip("no sshd on this machine (Debian: openssh-server)")
    folder = tmp_path / "sshd"
    folder.mkdir(mode=0o700)
    for name in ("host", "id"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    port = free_port()
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/id.pub\n"
        f"StrictModes no\nUsePAM no\nPidFile {folder}/pid\n"
    )
    (folder / "ssh_config").write_text(
        f"Host a b c\n HostName 127.0.0.1\n Port {port}\n IdentityFile {folder}/id\n StrictHostKeyChecking no\n"
        f" UserKnownHostsFile {folder}/known\n LogLevel ERROR\n"
    )
    process = subprocess.Popen([found, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        while b"listening" not in (line := process.stderr.readline()):
            assert line, "sshd does not start"
        yield f"ssh -F {folder}/ssh_config"
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.slow
def test_three_nodes_through_a_real_sshd(sshd: str, launched: Callable[..., Launched]) -> None:
    run = launched(sshd, "a,b,c", "--iterations", "3")
    code, out = run.end()
    assert code == 0 and "3 iterations are done" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_real_connection_ends_its_node(sshd: str, launched: Callable[..., Launched], number: int) -> None:
    run = launched(sshd, "a,b,c")
    run.wait_until_at_work()
    run.process.send_signal(number)
    code, out = run.end()
    assert code == (130 if number == signal.SIGINT else -number), out
    until(lambda: not leftovers(run.log_path))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A real Slurm with three nodes on this machine."""
    search = f"{os.environ['PATH']}:/usr/sbin"
    controller, node = (shutil.which(name, path=search) for name in ("slurmctld", "slurmd"))
    if controller is None or node is None or os.getuid() != 0:
        pytest.skip("no Slurm on this machine, or not root (Debian: slurm-wlm)")
    folder, host = tmp_path / "slurm", socket.gethostname()
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    ports = [free_port() for _ in range(4)]
    (folder / "slurm.conf").write_text(
        f"ClusterName=here\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser=root\nAuthType=auth/none\nCredType=cred/none\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool/%n\nSlurmctldPidFile={folder}/ctld.pid\n"
        f"SlurmdPidFile={folder}/%n.pid\nProctrackType=proctrack/pgid\nTaskPlugin=task/none\nMpiDefault=none\n"
        f"SelectType=select/cons_tres\nReturnToService=2\nSlurmctldPort={ports[0]}\n"
        + "".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
            for number, port in enumerate(ports[1:])
        )
        + "PartitionName=all Nodes=n[0-2] Default=YES State=UP\n"
    )
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    daemons = [subprocess.Popen([controller, "-D"], stderr=subprocess.DEVNULL)]
    daemons += [
        subprocess.Popen([node, "-D", "-N", f"n{number}"], stderr=subprocess.DEVNULL) for number in range(3)
    ]
    try:
        until(lambda: slurm_says("sinfo", "-h", "-o", "%D %t") == "3 idle")
        yield
    finally:
        subprocess.run(["scancel", "-u", "root"], check=False)
        # A slurmd that ends before its job does leaves the job's processes behind.
        until(lambda: slurm_says("squeue", "-h") == "")
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def slurm_says(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def submitted(log_path: Path, **options: str) -> str:
    """Start a toy's run as a Slurm job; gives its number."""
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words += ["--log-path", str(log_path), "--fsbarrier", FSBARRIER]
    said = typed("launch", "slurm", *words, "--program", "toy", "toy.tasks=6", "toy.phase_s=0.1")
    return said.out.split()[-1]  # … scancel JOB


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_slurm_job_stops_at_its_time_limit_and_goes_on(
    tmp_path: Path, slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log_path = tmp_path / "run"
    job = submitted(log_path, nodes="3", time="3", warn="120")

    def finished() -> list[int]:
        events = read_events(log_path) if log_path.is_dir() else []
        return sorted(
            {event.iteration for event in events if event.name == "iteration_finished" and event.iteration}
        )

    def requeued() -> bool:
        return slurm_says("squeue", "-h", "-j", job, "-o", "%T %r") == "PENDING BeginTime"

    until(lambda: bool(finished()))
    until(requeued)
    # The toy's iterations are so short that its nodes may have ended before anybody looks whom the request reaches.
    told = (tmp_path / f"fsbarrier-{job}.log").read_text()
    assert "asked nodes 0, 1, 2 of run" in told or "there is nothing to stop" in told
    before = finished()
    assert before and not leftovers(log_path)
    slurm_says("scontrol", "update", f"JobId={job}", "StartTime=now")
    until(lambda: finished()[-1:] > before[-1:])
    assert finished() == list(range(1, finished()[-1] + 1))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_slurm_job_goes_on_with_more_nodes(
    tmp_path: Path, slurm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log_path = tmp_path / "run"
    for nodes, iterations in (("2", "1"), ("3", "2")):
        job = submitted(log_path, nodes=nodes, iterations=iterations)
        # Whoever is refused would leave the others with the allocation.
        until(lambda job=job: slurm_says("squeue", "-h", "-j", job) == "")
        told = (tmp_path / f"fsbarrier-{job}.log").read_text()
        assert f"{iterations} iteration{'s are' if iterations != '1' else ' is'} done" in told, told
    finished = {
        event.iteration: event for event in read_events(log_path) if event.name == "iteration_finished"
    }
    assert sorted(one for one in finished if one) == [1, 2]
    entered = {event.node_rank for event in read_events(log_path) if event.iteration == 2}
    assert entered == {0, 1, 2}
