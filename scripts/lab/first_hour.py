#!/usr/bin/env python3
"""What a newcomer does in the first hour, for real: an own tiny model, own tasks, an own reward and agent, real vLLM on a CPU.

    python scripts/lab/first_hour.py
    python scripts/lab/first_hour.py --chapter failures --folder /tmp/hour

Each step is typed as a user types it, and says what it must end with and what must be read. A step that disappoints is told, and the story
goes on where it can. Exit code 1 if any did. About a quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
END_S = 900.0
LETTERS = " 0123456789+=?.abcdefghijklmnopqrstuvwxyz\n<>:"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
MINE = """
def reward(prompt, response, answer, metadata):
    digits = sum(letter.isdigit() for letter in response)
    return {"reward": digits / max(1, len(response)), "length": len(response)}

def broken(prompt, response, answer, metadata):
    raise ValueError("my reward divides by nothing")

class Twice:
    async def run(self, task, client):
        messages = task.messages
        reply = await client.chat(messages)
        messages += [reply.message, {"role": "user", "content": "sure?"}]
        await client.chat(messages)
        return client.trajectory(asked=1)

class Breaks:
    async def run(self, task, client):
        raise OSError("my agent lost its environment")
"""
SMALL = (
    *(
        "rollout.tasks=6",
        "rollout.samples=4",
        "rollout.max_tokens=12",
        "eval.tasks=4",
        "trainer.minibatch=24",
    ),
    *("engine.max_model_len=128", "optimizer.lr=1e-4"),
)


class Story:
    """The folder of a newcomer, the nodes that run, and what has disappointed so far."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, dict[int, subprocess.Popen[str]]()
        self.disappointed, self.began = list[str](), time.monotonic()
        self.run = folder / "run"

    def tell(self, what: str, problem: str = "") -> None:
        print(
            f"{time.monotonic() - self.began:6.0f} s  {'FAILS' if problem else 'ok   '}  {what}", flush=True
        )
        if problem:
            print("\n".join(f"      | {line}" for line in problem.splitlines()[-25:]), flush=True)
            self.disappointed.append(what)

    def popen(self, words: tuple[str, ...]) -> subprocess.Popen[str]:
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PYTHONPATH": str(REPO)}
        environ["FSBARRIER_LOG_PATH"] = str(self.run)
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def types(
        self, *words: str, code: int = 0, says: tuple[str, ...] = (), program: str = "fsbarrier"
    ) -> str:
        """Run one command to its end; it must end with `code`, and its output contain each of `says`."""
        process = self.popen((program, *words))
        try:
            said, _ = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            said, _ = process.communicate()
        self.judge(" ".join((program, *words)), process.returncode, said, code, says)
        return said

    def judge(self, what: str, code: int, said: str, wanted: int, says: tuple[str, ...]) -> None:
        missing = [text for text in says if text not in said]
        problem = f"exit code {code}, not {wanted}\n" if code != wanted else ""
        problem += f"does not say {missing}\n" if missing else ""
        problem += "an internal error\n" if "internal error" in said else ""
        self.tell(what[:150], said + problem if problem else "")

    def starts(self, rank: int, *words: str) -> None:
        which = ("--worker", str(rank)) if rank else ("--master",)
        self.nodes[rank] = self.popen(("fsbarrier", "run", *which, *words))

    def end(self, code: int = 0, says: tuple[str, ...] = ()) -> None:
        """All nodes must end with `code`, and node 0 say each of `says`."""
        for rank, process in sorted(self.nodes.items()):
            said, _ = process.communicate(timeout=END_S)
            self.judge(f"node {rank} ends", process.returncode, said, code, () if rank else says)
        self.nodes.clear()

    def waits(self, until: Callable[[dict[str, object]], bool]) -> None:
        """Wait for something in `status --json`."""
        end = time.monotonic() + END_S
        while time.monotonic() < end:
            process = self.popen(("fsbarrier", "status", "--json"))
            said, _ = process.communicate()
            if said.startswith("{") and until(json.loads(said)):
                return
            time.sleep(1.0)
        self.tell("a state of the run that does not come", said)

    def check(self, what: str, holds: bool) -> None:
        self.tell(what, "" if holds else "it does not hold")

    def close(self) -> None:
        for process in self.nodes.values():
            process.kill()


def prepare(story: Story) -> None:
    """The model, the tasks and the code of the newcomer's own."""
    import tokenizers
    import transformers

    folder = story.folder
    (folder / "mine.py").write_text(MINE)
    for name, first, count in (("train", 0, 24), ("test", 24, 8)):
        (folder / "data").mkdir(exist_ok=True)
        tasks = [
            {"prompt": [{"role": "user", "content": f"{n}+1="}], "answer": str(n + 1)}
            for n in range(first, first + count)
        ]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    words = {letter: number for number, letter in enumerate(("<pad>", "<end>", "<unk>", *LETTERS))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
    config = transformers.Qwen2Config(
        vocab_size=len(words),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def own(story: Story) -> tuple[str, ...]:
    data = ("--data-path", str(story.folder / "data"), "--model", str(story.folder / "model"))
    return (*data, "reward.kind=mine.py:reward", "rollout.agent=mine.py:Twice", *SMALL)


def first_run(story: Story) -> None:
    """Look before, run, change the learning rate, stop, resume, add a node, lose one, remove one."""
    story.types("doctor", str(story.folder), says=("can support a run",))
    story.types(
        "plan",
        "--model",
        str(story.folder / "model"),
        "--nodes",
        "2",
        says=("million parameters", "checkpoint"),
    )
    story.types(
        "launch", "local", "--nodes", "2", *own(story), "--dry-run", says=("mine.py:reward", "10 update")
    )
    story.check("a dry run makes nothing", not story.run.exists())
    story.types(
        "launch", "local", "--nodes", "2", *own(story), "--iterations", "2", says=("finished", "2 iterations")
    )
    story.types(
        "run", "--master", "--iterations", "2", says=("already done its 2 iterations", "larger --iterations")
    )
    for rank in (1, 0):
        story.starts(rank, *(() if rank else ("--iterations", "9", "optimizer.lr=2e-4")))
    story.waits(lambda status: status["iteration"] == 4)
    story.types("status", says=("running", "node"))
    story.types("stop", says=("asked nodes 0, 1",))
    story.end(says=("optimizer.lr changes", "stopped before iteration", "as "))
    for rank in (2, 1, 0):
        story.starts(rank, *(() if rank else ("--num-nodes", "3", "--iterations", "6")))
    story.waits(lambda status: status["iteration"] in (5, 6) and status["phase"]["index"] == 2)  # type: ignore[index]
    os.killpg(story.nodes[2].pid, signal.SIGKILL)
    story.nodes.pop(2).wait()
    story.end(says=("node 2", "6 iterations are done"))
    story.types("launch", "local", "--nodes", "1", "--iterations", "7", says=("finished",))
    story.types("top", says=("finished",))
    story.types("runs", str(story.folder), says=("finished",))
    story.types("logs", says=("node 0",))


def results(story: Story) -> None:
    """Export and load the model, merge by hand, recover, report."""
    out = story.folder / "exported"
    story.types("export", str(out), says=(str(out),))
    story.types("export", str(story.folder / "five.jsonl"), "--iteration", "5", says=("24",))
    load = f"import transformers as t; print(t.AutoModelForCausalLM.from_pretrained({str(out)!r}).num_parameters())"
    loaded = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    story.check("the exported model loads in transformers", loaded.returncode == 0)
    merged = story.run / "train_trajectories" / "train_trajectories.pt.iteration7"
    merged.unlink(missing_ok=True)
    story.types("--log-path", str(story.run), "--iteration", "7", program="fsbarrier.aggregate", says=("24",))
    read = f"import torch; print(len(torch.load({str(merged)!r}, weights_only=True)['trajectories']))"
    opened = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, check=False)
    story.check("the merged file opens in torch", opened.stdout == "24\n")
    story.types("recover", "--iteration", "7", "--dry-run", says=("complete",))
    part = max((story.run / "train_trajectories").glob("*iteration7_rank_0.checkpoint"))
    part.write_bytes(part.read_bytes()[:-20])
    story.types("recover", "--iteration", "7", says=(part.name,))
    story.types("launch", "local", "--iterations", "8", says=("finished",))
    story.types("report", "--csv", str(story.folder / "run.csv"), says=("run.csv",))
    story.types("report", says=("report.html",))
    other = ("launch", "local", "--log-path", str(story.folder / "second"), f"init_from={story.run}@8")
    data = ("--data-path", str(story.folder / "data"), "--iterations", "1", "reward.kind=numeric", *SMALL)
    story.types(*other, *data, says=("finished",))


#: what fails, by its setting or flag, and the line of its own that must be read in each place
FAILURES = {
    "reward": (("reward.kind=mine.py:broken", "rollout.max_error_share=0"), "my reward divides by nothing"),
    "agent": (("rollout.agent=mine.py:Breaks",), "my agent lost its environment"),
    "engine": (("engine.extra_args=--no-such-flag",), "unrecognized arguments: --no-such-flag"),
    "trainer": (
        ("trainer.command=python -c \"raise RuntimeError('my trainer has no kernel')\" {spec}",),
        "RuntimeError: my trainer has no kernel",
    ),
    "killed trainer": (('trainer.command=python -c "import os; os.kill(os.getpid(), 9)" {spec}',), "SIGKILL"),
}


def failures(story: Story) -> None:
    """Each program that fails says why: in the live view and the summary, in `status`, `logs --first-error` and the report."""
    for name, (words, said) in FAILURES.items():
        story.run = story.folder / f"failing {name}"
        story.types(
            "launch", "local", *own(story), *words, "--iterations", "1", code=4, says=(said, "exit code 4")
        )
        story.types("logs", "--first-error", says=(said,))
        story.types("status", says=("broken", said))
        story.types("report")
        page = story.run / "report.html"
        story.check("the report says it too", page.exists() and said in page.read_text())


CHAPTERS = {"first run": first_run, "results": results, "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where to play (default: a temporary folder)")
    parser.add_argument("--chapter", choices=CHAPTERS, action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="first-hour-"))
    folder.mkdir(parents=True, exist_ok=True)
    story = Story(folder.resolve())
    print(f"in {folder}")
    try:
        if not (folder / "model").exists():
            prepare(story)
        for name in args.chapter or CHAPTERS:
            print(f"--- {name}")
            CHAPTERS[name](story)
    finally:
        story.close()
    print(f"{len(story.disappointed)} disappointed" if story.disappointed else "nothing disappoints")
    return 1 if story.disappointed else 0


if __name__ == "__main__":
    sys.exit(main())
