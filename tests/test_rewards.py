"""Rewards: built in, of one's own, and a judge's."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import pytest
from PIL import Image
from waiting import slowness

from fsbarrier.data.images import text_of
from fsbarrier.data.tasks import Task, read_tasks
from fsbarrier.errors import UsageError
from fsbarrier.rewards import model_server
from fsbarrier.rewards.judge import Judge, JudgeError
from fsbarrier.rewards.kinds import about_scorers, check_answers, open_reward
from fsbarrier.rewards.matching import last_number
from fsbarrier.rewards.score import Answer, Score
from fsbarrier.settings.sections import JudgeSettings


def task(answer: Any, **metadata: Any) -> Task:
    return Task(0, "t-0", "question", answer, metadata)


def judge(kind: str, *pairs: tuple[Any, str], timeout_s: float = 60.0, **metadata: Any) -> list[Score]:
    async def run() -> list[Score]:
        reward = open_reward(kind, timeout_s=timeout_s)
        try:
            return await asyncio.gather(
                *(reward.score(task(answer, **metadata), Answer(text)) for answer, text in pairs)
            )
        finally:
            await reward.close()

    return asyncio.run(run())


async def opened(kind: str, **more: Any) -> None:
    reward = open_reward(kind, **more)
    try:
        await reward.open()
    finally:
        await reward.close()


def test_verl_chooses_by_data_source(tmp_path: Path) -> None:
    """Two kinds of tasks in one file; what each gets is what verl's own scorer gives."""
    path = tmp_path / "train.jsonl"
    rows = [
        {"data_source": "openai/gsm8k", "reward_model": {"style": "rule", "ground_truth": "1072"}},
        {
            "data_source": "lighteval/MATH",
            "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
        },
    ]

    def written(*more: dict[str, Any]) -> dict[int, Task]:
        path.write_text("".join(json.dumps({"prompt": "?", **row}) + "\n" for row in [*rows, *more]))
        return dict(read_tasks(path).tasks)

    tasks = written()
    check_answers("verl", tasks.values(), path)
    said = about_scorers("verl", tasks.values(), path)
    assert said.endswith("train.jsonl: gsm8k for openai/gsm8k (1), math for lighteval/MATH (1)")
    assert "reward.kind=verl chooses" in about_scorers("exact", tasks.values(), path)
    assert about_scorers("numeric", tasks.values(), path) == ""

    async def scores() -> list[list[float]]:
        reward = open_reward("verl")
        try:
            await reward.open()
            sums = await reward.score_group(
                tasks[0],
                [Answer("72 and 1000\n#### 1,072"), Answer("it is 1072"), Answer("#### 1072\n#### 5")],
            )
            maths = await reward.score_group(tasks[1], [Answer("\\boxed{0.5}"), Answer("#### 7")])
            return [[one.reward for one in group] for group in (sums, maths)]
        finally:
            await reward.close()

    assert asyncio.run(scores()) == [[1.0, 0.0, 0.0], [1.0, 0.0]]
    for row, says in (
        ({"data_source": "searchR1_nq", "answer": "1"}, r"data_source=searchR1_nq has no scorer here; the known ones are openai/gsm8k, "),
        ({"answer": "2"}, "has no data_source"),
        ({"data_source": "aime2024", "reward_model": {"style": "model", "ground_truth": "3"}}, "style=model is scored by a model"),
        ({"data_source": "openai/gsm8k", "answer": "none"}, "needs an answer with a number"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"train.jsonl, line 3: .*{says}"):
            check_answers("verl", written(row).values(), path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("the answer is 42.", 42.0),
        ("first 3, then 4", 4.0),
        ("1,234,567.5 in all", 1234567.5),
        ("12,34", 34.0),
        ("$1,250", 1250.0),
        (r"\$1{,}250", 1250.0),
        ("50%", 50.0),
        (r"50\%", 50.0),
        ("3/4", 0.75),
        (r"\frac{3}{4}", 0.75),
        (r"so $x = -\dfrac{1}{8}$", -0.125),
        (r"\boxed{7} which is not 8", 7.0),
        (r"\boxed{\frac{10}{4}} units 9", 2.5),
        (r"\boxed{x} and then 9", 9.0),
        ("minus: -5", -5.0),
        ("\u22125", -5.0),
        ("-$5", -5.0),
        ("10-3", 3.0),
        ("10 - 3", 3.0),
        ("1.5e-3", 0.0015),
        (".5", 0.5),
        ("#### 18", 18.0),
        ("none", None),
        ("5/0", 5.0),
        ("1e999", None),
        ("", None),
    ],
)
def test_the_last_number_of_a_text(text: str, value: float | None) -> None:
    assert last_number(text) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_math_reads_latex_and_survives_what_cannot_be_read() -> None:
    pytest.importorskip("math_verify")
    right, boxed, wrong, unreadable, half, plain = judge(
        "math",
        (r"\frac{1}{2}", r"Thus $x = 0.5$."),
        ("(1,2)", r"The pair is \boxed{(1, 2)}"),
        ("3", r"\boxed{4}"),
        ("$$", r"\boxed{4}"),
        ("3", "half a pair: \ud800"),
        ("$x^2+1$", r"$1+x^2$"),
    )
    assert [score.reward for score in (right, boxed, wrong, plain)] == [1.0, 1.0, 0.0, 1.0]
    assert right.parts == {"math": 1.0} and right.error is None and wrong.error is None
    assert unreadable.error is not None and "cannot parse the answer" in unreadable.error
    assert (half.reward, half.error) == (0.0, None)


FUNCTIONS = """
import asyncio
import time
import threading
from helper import bonus

def plain(prompt, response, answer, metadata):
    return bonus(len(response)) if metadata["task_id"] == "t-0" else -1

async def patient(prompt, response, answer, metadata):
    await asyncio.sleep(0)
    return {"reward": response == answer, "length": len(response), "why": ["text"]}

def returns_coroutine(prompt, response, answer, metadata):
    return patient(prompt, response, answer, metadata)

def raises(prompt, response, answer, metadata):
    raise KeyError("colour")

def stops(prompt, response, answer, metadata):
    return next(iter(()))

def leaves(prompt, response, answer, metadata):
    raise SystemExit("enough")

async def leaves_later(prompt, response, answer, metadata):
    raise SystemExit(0)

def leaves_coroutine(prompt, response, answer, metadata):
    return leaves_later(prompt, response, answer, metadata)

def nothing(prompt, response, answer, metadata):
    pass

def nan(prompt, response, answer, metadata):
    return {"reward": float("nan")}

def hangs(prompt, response, answer, metadata):
    threading.Event().wait()

def hangs_once(prompt, response, answer, metadata):
    while response == "slow":
        pass
    return 1.0

async def hangs_async(prompt, response, answer, metadata):
    await asyncio.Event().wait()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("def bonus(n):\n    return n / 10\n")
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path / "mine.py"


def test_a_function_of_ones_own_may_be_plain_or_async_and_give_parts(file: Path) -> None:
    (score,) = judge(f"{file}:plain", ("abc", "abc"))
    assert (score.reward, score.parts, score.error) == (0.3, {"plain": 0.3}, None)
    for name in ("patient", "returns_coroutine"):
        right, wrong = judge(f"{file}:{name}", ("abc", "abc"), ("abc", "ab"))
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        assert right.parts == {name: 1.0, "length": 3.0} and right.info == {"why": "['text']"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "raises: KeyError: 'colour'"),
        ("stops", "stops: StopIteration"),
        ("leaves", "leaves: SystemExit: enough"),
        ("leaves_later", "leaves_later: SystemExit: 0"),
        ("leaves_coroutine", "leaves_coroutine: SystemExit: 0"),
        ("nothing", "nothing: gave None, not a finite number"),
        ("nan", "nan: gave nan, not a finite number"),
    ],
)
def test_a_function_that_fails_is_an_error_in_the_score(file: Path, name: str, message: str) -> None:
    (score,) = judge(f"{file}:{name}", ("a", "a"))
    assert score.reward == 0.0 and score.error is not None and message in score.error


@pytest.mark.parametrize("name", ["hangs", "hangs_async"])
def test_a_function_has_its_time_and_no_more(file: Path, name: str) -> None:
    begin = time.monotonic()
    (score,) = judge(f"{file}:{name}", ("a", "a"), timeout_s=0.1)
    assert score.error == f"{name}: no reward within 0.1 s (reward.timeout_s)"
    assert 0.1 <= score.seconds <= time.monotonic() - begin


def test_a_process_that_is_late_is_killed_and_replaced(file: Path) -> None:
    # The quick ones, which wait for the process that replaces it, must be done within the same limit.
    limit_s = float(round(3 * slowness()))
    late, *good = judge(f"{file}:hangs_once", ("a", "slow"), *([("a", "quick")] * 20), timeout_s=limit_s)
    assert late.error == f"hangs_once: no reward within {limit_s:g} s (reward.timeout_s)"
    assert [score.reward for score in good] == [1.0] * 20


@pytest.mark.parametrize(
    ("kind", "answer", "response", "reward"),
    [
        ("exact", "Rome", " Rome\n", 1),
        ("exact", "Rome", "rome", 0),
        ("numeric", 3, "it is 3.0000001", 1),
        ("numeric", 3, "it is 3.001", 0),
        ("numeric", "1,000", "1000 apples", 1),
        # Any answer of a list is right.
        ("exact", ["Rome", "Roma"], "Roma ", 1),
        ("exact", ["Rome", "Roma"], "['Rome', 'Roma']", 0),
        ("numeric", ["3", 4], "it is 4.0", 1),
    ],
)
def test_each_kind_of_reward_compares_as_it_says(
    kind: str, answer: object, response: str, reward: float
) -> None:
    (score,) = judge(kind, (answer, response))
    assert score.reward == reward and score.parts == {kind: reward}


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path, file: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_this_name\n")
    (tmp_path / "open.py").write_text("def f(\n")
    for kind, message in (
        ("exakt", "must be exact, numeric, math, code, verl, judge, engines.NAME or path/file.py:function"),
        (f"{tmp_path}/none.py:f", "no such file"),
        (f"{file}:missing", "does not define missing"),
        (f"{broken}:f", "cannot load .*: ModuleNotFoundError"),
        (f"{tmp_path}/open.py:f", r"SyntaxError: '\(' was never closed \(open.py, line 1\)$"),
    ):
        with pytest.raises(UsageError, match=message):
            asyncio.run(opened(kind))


MORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(solution_str == ground_truth)
    return {"score": right, "acc": right, "level": extra_info["level"], "of": data_source}

def plain_score(data_source, solution_str, ground_truth, extra_info=None):
    return 2.0 * (solution_str == ground_truth)

def short(prompt, response, answer, metadata):
    return -len(response)

def rank(prompt, responses, answer, metadata):
    best = max(responses, key=len)
    return [{"reward": float(one == best), "others": len(responses) - 1} for one in responses]

def too_few(prompt, responses, answer, metadata):
    return [1.0]
"""


def judged_together(kinds: str, texts: list[str], **more: Any) -> list[Score]:
    async def run() -> list[Score]:
        reward = open_reward(kinds, **more)
        given = {"data_source": "gsm8k", "extra_info": {"level": 3}}
        try:
            return await reward.score_group(task("ab", **given), [Answer(text) for text in texts])
        finally:
            await reward.close()

    return asyncio.run(run())


@pytest.fixture
def more(tmp_path: Path) -> str:
    (tmp_path / "more.py").write_text(MORE)
    return f"{tmp_path}/more.py"


def test_a_function_may_see_the_whole_group(more: str) -> None:
    scores = judged_together(f"{more}:rank", ["a", "abc", "ab"])
    assert [score.reward for score in scores] == [0, 1, 0] and scores[0].parts["others"] == 2
    (failed, also) = judged_together(f"{more}:too_few", ["a", "b"])
    assert failed.error == also.error and "too_few: gave [1.0], not a list of 2" in str(failed.error)
    assert judged_together(f"{more}:rank", []) == []


def test_a_function_written_for_verl_gets_what_verl_gives(more: str) -> None:
    right, wrong = judged_together(f"{more}:compute_score", ["ab", "x"])
    assert (right.reward, wrong.reward) == (1, 0)
    assert right.parts == {"compute_score": 1, "acc": 1, "level": 3} and right.info == {"of": "gsm8k"}
    assert judged_together(f"{more}:plain_score", ["ab"])[0].reward == 2


def test_several_rewards_are_added_up(more: str) -> None:
    kinds = f"exact, {more}:short,{more}:rank"
    right, long = judged_together(kinds, ["ab", "abcd"], weights=(1.0, 0.1, -2.0))
    assert (right.reward, long.reward) == (pytest.approx(1 - 0.2), pytest.approx(-0.4 - 2))
    assert right.parts == {"exact": 1, "short": -2, "rank": 0, "others": 1}
    assert judged_together(kinds, ["ab"])[0].reward == 1 - 2 + 1
    assert judged_together("exact,exact", ["ab"])[0].parts == {"exact": 1, "exact_2": 1}
    # What one of them cannot judge has no reward.
    failed = judged_together(f"exact,{more}:too_few", ["ab", "x"])[0]
    assert failed.reward == 0 and failed.error is not None and failed.parts == {"exact": 1}


# --- a judge --------------------------------------------------------------------------------------------------------------------

KEY = "of the judge"


class StandIn(ThreadingHTTPServer):
    """Answers with what stands after "say " in a question, where "|" begins a line.

    The first time it answers 503 or 429 to "busy", and never to "hang".
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock, self.now, self.most, self.asked = threading.Lock(), 0, 0, list[dict[str, Any]]()
        self.together, self.over = threading.Barrier(2), threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def settings(self, **changes: Any) -> JudgeSettings:
        own = {"url": f"http://127.0.0.1:{self.server_port}/v1", "model": "wise", "api_key_env": "JUDGE_KEY"}
        return JudgeSettings(**{**own, **changes})


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = text_of(body["messages"][-1]["content"])
        with server.lock:
            again = question in [text_of(each["messages"][-1]["content"]) for each in server.asked]
            server.asked.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        if "together" in question:
            server.together.wait(30)
        if "hang" in question:
            server.over.wait(30)
        with server.lock:
            server.now -= 1
        status = 400 if "refuse" in question else 200
        if "busy" in question and not again:
            status = 429 if "too busy" in question else 503
        if self.headers["Authorization"] != f"Bearer {KEY}":
            status = 401
        text = question.rpartition("say ")[2].partition("\n")[0].replace("|", "\n")
        value = {"choices": [{"message": {"role": "assistant", "content": f"Well.\n{text}"}}]}
        data = json.dumps(value if status == 200 else {"error": {"message": "not now"}}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def judged_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = StandIn()
    yield server
    server.over.set()
    server.shutdown()
    server.server_close()


def scores(kind: str, settings: JudgeSettings, *responses: str, timeout_s: float = 60.0) -> list[Score]:
    async def run() -> list[Score]:
        reward = open_reward(kind, timeout_s=timeout_s, judge=settings)
        try:
            task = Task(0, "t", "how much?", "4", {})
            return await asyncio.gather(*(reward.score(task, Answer(response)) for response in responses))
        finally:
            await reward.close()

    return asyncio.run(run())


def test_the_judges_grade_is_the_reward(judged_by: StandIn) -> None:
    right, half = scores("judge", judged_by.settings(), "say 1", "say 0.5")
    assert (right.reward, half.reward, right.parts) == (1.0, 0.5, {"judge": 1.0})
    assert right.info == {"judge": "Well.\n1"} and right.error is None
    question = judged_by.asked[0]
    assert (question["model"], question["temperature"]) == ("wise", 0)
    assert all(part in question["messages"][0]["content"] for part in ("how much?", "4", "say "))


@pytest.mark.parametrize(("shows", "seen"), [("none", ""), ("last", "b"), ("all", "ab")])
def test_a_judge_is_shown_what_the_policy_saw(
    judged_by: StandIn, tmp_path: Path, shows: Literal["none", "last", "all"], seen: str
) -> None:
    """Files, as the run keeps them: each once, in order, before the text; and one that is no image is an error of the reward."""
    for name, kind in (("a", "PNG"), ("b", "JPEG")):
        Image.new("RGB", (9, 9), (ord(name), 0, 0)).save(tmp_path / name, kind)
    (tmp_path / "c").write_bytes(b"GIF89a")

    async def run() -> list[Score]:
        reward = open_reward("judge", judge=judged_by.settings(images=shows))
        task = Task(0, "t", ({"role": "user", "content": [{"type": "text", "text": "where?"}]},), None, {})
        answers = [
            Answer(f"say {grade}", None, (), [str(tmp_path / one) for one in names])
            for grade, names in ((1, "abab"), (0.5, ""), (0.25, "c"))
        ]
        try:
            return await reward.score_group(task, answers)
        finally:
            await reward.close()

    found = asyncio.run(run())
    contents = {len(one["messages"][0]["content"]): one["messages"][0]["content"] for one in judged_by.asked}
    texts = [text_of(one) for one in contents.values()]
    assert all("Reference" not in text and "where?" in text for text in texts)
    assert [one.reward for one in found[:2]] == [1.0, 0.5]
    if shows == "none":
        assert all(isinstance(one, str) for one in contents.values()) and found[2].reward == 0.25
        return
    assert str(found[2].error).startswith("an image for the judge: is no image of a known kind")
    *pictures, text = contents[len(seen) + 1]
    assert text["type"] == "text" and "seen" in text["text"]
    kinds = {"a": "png", "b": "jpeg"}
    for name, picture in zip(seen, pictures, strict=True):
        head, _, data = picture["image_url"]["url"].partition(",")
        assert head == f"data:image/{kinds[name]};base64"
        assert base64.b64decode(data) == (tmp_path / name).read_bytes()


def test_the_judge_is_asked_again_where_that_may_help(judged_by: StandIn) -> None:
    busy, limited, refused = scores("judge", judged_by.settings(), "busy, say 1", "too busy, say 1", "refuse")
    assert (busy.reward, busy.error) == (limited.reward, limited.error) == (1.0, None)
    assert refused.error == "the judge refuses: HTTP 400: not now"
    assert len(judged_by.asked) == 5


def test_a_grade_is_between_0_and_1_and_few_are_asked_for_at_once(
    judged_by: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "CONCURRENCY", 2)
    *wrong, right = scores("judge", judged_by.settings(), *(f"together, say {n}" for n in (7, -1, 10, 1)))
    assert all(score.reward == 0 and "no number from 0 to 1" in str(score.error) for score in wrong)
    assert right.reward == 1 and judged_by.most == 2


@pytest.mark.parametrize(
    ("said", "grade"),
    [
        ("2 of 4 are right|**0.75**.", 0.75),
        ("Grade: 0.5", 0.5),
        ("it ends in \\boxed{0}|Grade: 1", 1.0),
        ("0.25|I am sure", None),
        ("1 would be too much", None),
        ("0 is what it deserves, although 0.5 of it holds", None),
        ("", None),
    ],
)
def test_a_judges_last_line_ends_with_the_grade(judged_by: StandIn, said: str, grade: float | None) -> None:
    (score,) = scores("judge", judged_by.settings(), f"say {said}")
    assert score.reward == (grade or 0.0)
    assert (score.error is None) == (grade is not None)
    if grade is None:
        assert "no number from 0 to 1" in str(score.error) and said.rpartition("|")[2] in str(score.error)


MINE = """
async def asks(prompt, response, answer, metadata, judge):
    said = await judge.ask(f"{response} together, say {answer}")
    return {"reward": float(said.split()[-1]) / 8, "said": said}

def plain(prompt, response, answer, metadata):
    return 1.0
"""


def test_a_function_of_ones_own_may_ask_it(
    judged_by: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six questions, two at once."""
    monkeypatch.setattr(model_server, "CONCURRENCY", 2)
    (tmp_path / "mine.py").write_text(MINE)
    found = scores(f"{tmp_path}/mine.py:asks", judged_by.settings(), *map(str, range(6)))
    assert [score.reward for score in found] == [0.5] * 6 and judged_by.most == 2
    assert scores(f"{tmp_path}/mine.py:plain", JudgeSettings(), "x")[0].reward == 1.0
    for kind in ("judge", f"{tmp_path}/mine.py:asks"):
        with pytest.raises(
            UsageError,
            match=r"uses a judge, which needs judge.model=engines.NAME, or judge.url and judge.model",
        ):
            asyncio.run(opened(kind, judge=JudgeSettings()))


class Hostile(BaseHTTPRequestHandler):
    """Answers without end, or compressed."""

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        if b"gzip" in body:
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b" " * (1 << 20))
        except OSError:
            return


@pytest.mark.parametrize(("question", "says"), [("endless", "longer than 8 MiB"), ("gzip", "compressed")])
def test_an_answer_is_bounded_and_no_password_is_stored(question: str, says: str) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def ask(port: int) -> str:
        judge = Judge(
            JudgeSettings(url=f"http://me:hidden@127.0.0.1:{port}/v1", model="wise"), timeout_s=60.0
        )
        try:
            with pytest.raises(JudgeError) as failed:
                await judge.ask(question)
            return str(failed.value)
        finally:
            await judge.close()

    try:
        assert says in asyncio.run(ask(server.server_port))
    finally:
        server.shutdown()
        server.server_close()
    gone = asyncio.run(ask(server.server_port))
    assert "does not answer" in gone and "hidden" not in gone
