"""The answers of a run: filters, a histogram of their rewards whose bars filter, and a list."""

from __future__ import annotations

import time
from asyncio import to_thread
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from nicegui import Client, ui
from nicegui.events import EChartPointClickEventArguments

from fsbarrier.data.trajectory import Trajectory
from fsbarrier.errors import FsbarrierError, UsageError
from fsbarrier.page.charts import bins, curve, histogram
from fsbarrier.page.layout import html, link, page
from fsbarrier.page.open_runs import OpenRun
from fsbarrier.page.render import part
from fsbarrier.rundir.names import SPLITS
from fsbarrier.view.answers import ORDERS, Answer, Filter, read_answer
from fsbarrier.view.conversation import turns
from fsbarrier.wording import visible

#: answers on a page of the list, and characters of an answer in it
ROWS, SNIPPET = 50, 160
ALL = "all"
#: fields of the filter as they are asked for: name, label, choices (None: any text)
FIELDS: Sequence[tuple[str, str, Sequence[str] | None]] = (
    ("words", "words in prompt or answer", None),
    ("task", "task", None),
    ("reward_from", "reward from", None),
    ("reward_to", "reward to", None),
    ("length_from", "tokens from", None),
    ("length_to", "tokens to", None),
    ("cut_off", "cut off", ("", "yes", "no")),
    ("failed", "failed", ("", "yes", "no")),
    ("node", "node", None),
    ("version", "policy version", None),
    ("set", "evaluation set", None),
)


@dataclass
class Asked:
    """What the address asks for. `texts`: the filter's, with `iteration` a number or "all"."""

    texts: dict[str, str]
    order: str = "worst"
    first: int = 0

    @classmethod
    def of(cls, query: dict[str, str], newest: dict[str, list[int]]) -> Asked:
        """Read the query of an address. If it names no split or iteration, it asks for the newest iteration of the first split with any."""
        order, first = query.pop("order", "worst"), query.pop("first", "0")
        split = query.get("split") or next((name for name in SPLITS if name in newest), SPLITS[0])
        iteration = query.get("iteration") or str(next(iter(newest.get(split, ())), ALL))
        texts = {**query, "split": split, "iteration": iteration}
        return cls(texts, order if order in ORDERS else "worst", int(first) if first.isdecimal() else 0)

    def filter(self) -> Filter:
        """The filter that the address describes. Raises UsageError."""
        return Filter.from_texts({name: "" if text == ALL else text for name, text in self.texts.items()})

    def address(self, run: str) -> str:
        return link(run, "answers", **self.texts, order=self.order, first=self.first or None)


@dataclass
class Found:
    """The answers that pass the filter without its rewards, and among them those that pass it whole, in order."""

    around: list[Answer] = field(default_factory=list)
    chosen: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    problem: str = ""


@dataclass
class Progress:
    """The progress of a search: how many of how many iterations are done. `stopped`: nobody wants its result any more."""

    done: int = 0
    total: int = 0
    stopped: bool = False

    def goes_on(self, done: int, total: int) -> bool:
        self.done, self.total = done, total
        return not self.stopped


def search(opened: OpenRun, asked: Asked, progress: Progress) -> Found:
    """Find the answers that an address asks for. It reads files, so call it in a thread."""
    found, began = Found(), time.monotonic()
    try:
        wanted = asked.filter()
        around = replace(wanted, reward_from=None, reward_to=None)
        found.around = list(opened.answers.matching(around, progress.goes_on))
        found.chosen = sorted(filter(wanted.admits, found.around), key=ORDERS[asked.order])
    except FsbarrierError as error:
        found.problem = str(error)
    found.seconds = time.monotonic() - began
    return found


def rows(opened: OpenRun, answers: Sequence[Answer]) -> list[tuple[Answer, str, str, str]]:
    """Each answer with the beginning of its text, and the addresses of its page and its group's. It reads files, so call it in a
    thread."""
    listed = []
    for answer in answers:
        try:
            beginning = snippet(read_answer(answer))
        except FsbarrierError as error:
            beginning = str(error)
        listed.append(
            (answer, beginning, place(opened.name, answer, "answer"), place(opened.name, answer, "group"))
        )
    return listed


def snippet(trajectory: Trajectory) -> str:
    """The beginning of the last turn that says something."""
    text = next((turn.text for turn in reversed(turns(trajectory)) if turn.text.strip()), "")
    return visible(" ".join(text[: 4 * SNIPPET].split())[:SNIPPET])


def place(run: str, answer: Answer, view: str) -> str:
    """The address of an answer, or of its group."""
    query = {"split": answer.split, "iteration": answer.iteration, "task": answer.task_index}
    return link(run, view, **query, **({"number": answer.number} if view == "answer" else {}))


class AnswersView:
    """What one browser shows of a run's answers."""

    def __init__(self, opened: OpenRun, asked: Asked, iterations: dict[str, list[int]]) -> None:
        self._opened, self._asked = opened, asked
        self._iterations = iterations
        self._progress = Progress()
        self._found = Found()
        self._bins: list[tuple[float, float, int]] = []

    def build(self) -> None:
        """Make the elements; `look` fills them."""
        self._inputs: dict[str, ui.select | ui.input] = {}
        with ui.element("div").classes("card"), ui.element("div").classes("filters"):
            self._select("split", "split", [*self._iterations] or [*SPLITS])
            known = sorted({n for many in self._iterations.values() for n in many}, reverse=True)
            self._select("iteration", "iteration", [ALL, *map(str, known)])
            for name, label, choices in FIELDS:
                if choices is not None:
                    self._select(name, label, choices)
                else:
                    entry = ui.input(label, value=self._asked.texts.get(name, "")).props(
                        "dense outlined clearable"
                    )
                    entry.on("keydown.enter", self._changed).on("clear", self._changed).on(
                        "blur", self._changed
                    )
                    entry.classes("wide" if name == "words" else "")
                    self._inputs[name] = entry
            order = ui.select([*ORDERS], value=self._asked.order, label="order").props("dense outlined")
            order.on_value_change(self._reorder)
            self._order = order
        self._status_line = ui.label().props("role=status").classes("muted")
        self._chart = ui.echart(histogram([], (None, None)), on_point_click=self._bar).style("height:150px")
        self._task_chart = ui.echart(curve({}), on_point_click=self._point).style("height:180px")
        self._list = html("")
        with ui.element("div").classes("pager"):
            self._previous = ui.button("previous", on_click=lambda: self._turn(-ROWS)).props(
                "flat no-caps dense"
            )
            self._next = ui.button("next", on_click=lambda: self._turn(ROWS)).props("flat no-caps dense")
        self._progress_timer = ui.timer(0.3, self._show_progress, active=False)

    def _select(self, name: str, label: str, choices: Sequence[str]) -> None:
        value = self._asked.texts.get(name, "")
        options = [*choices, *([value] if value not in choices else [])]
        chosen = ui.select(options, value=value, label=label).props("dense outlined")
        chosen.on_value_change(self._changed)
        self._inputs[name] = chosen

    async def _changed(self) -> None:
        texts = {name: str(field.value or "").strip() for name, field in self._inputs.items()}
        kept = {name: text for name, text in texts.items() if text}
        if kept != self._asked.texts:
            self._asked.texts, self._asked.first = kept, 0
            await self.look()

    async def _reorder(self) -> None:
        self._asked.order, self._asked.first = str(self._order.value), 0
        await self.look()

    async def _turn(self, by: int) -> None:
        self._asked.first = max(0, self._asked.first + by)
        await self._show()

    async def _bar(self, event: EChartPointClickEventArguments) -> None:
        """A click on a bar chooses its rewards, and a second one on the same bar all of them."""
        begin, end, _ = self._bins[int(event.data_index)]
        same = self._asked.texts.get("reward_from") == str(begin) and self._asked.texts.get(
            "reward_to"
        ) == str(end)
        for name, value in (("reward_from", begin), ("reward_to", end)):
            self._inputs[name].value = "" if same else str(value)
        await self._changed()

    def _point(self, event: EChartPointClickEventArguments) -> None:
        data: object = event.data
        if isinstance(data, list | tuple) and data:
            query = {**self._asked.texts, "iteration": int(data[0])}
            ui.navigate.to(link(self._opened.name, "answers", **query))

    def _show_progress(self) -> None:
        if self._progress.total > 1:
            self._status_line.set_text(f"reading: {self._progress.done} of {self._progress.total} iterations")

    def stop(self) -> None:
        """Stop the search, because nobody looks any more."""
        self._progress.stopped = True

    async def look(self) -> None:
        """Search, and show what was found. A search that another one has replaced shows nothing."""
        self.stop()
        progress = self._progress = Progress()
        self._progress_timer.activate()
        found = await to_thread(search, self._opened, self._asked, progress)
        if progress is not self._progress:
            return
        self._progress_timer.deactivate()
        self._found = found
        await self._show()

    async def _show(self) -> None:
        found, first, asked = self._found, self._asked.first, self._asked
        shown = found.chosen[first : first + ROWS]
        made = await to_thread(rows, self._opened, shown)
        self._list.set_content(part("answers", made))
        scored = [answer.reward for answer in found.around if answer.reward is not None]
        self._bins = bins(scored)
        chosen = Filter() if found.problem else asked.filter()
        _draw(self._chart, histogram(self._bins, (chosen.reward_from, chosen.reward_to)))
        iterations = {answer.iteration for answer in found.chosen} if chosen.task else set()
        self._task_chart.set_visibility(len(iterations) > 1)
        if len(iterations) > 1:
            _draw(
                self._task_chart,
                curve(_by_iteration(found.chosen), about="rewards of this task by iteration"),
            )
        end = first + len(shown)
        place_in = f"{first + 1} to {end} of " if len(found.chosen) > ROWS else ""
        counts = f"{place_in}{len(found.chosen):,} answers; {len(scored):,} scored ones in the histogram"
        self._status_line.set_text(visible(found.problem) or f"{counts} ({found.seconds:.2f} s)")
        self._previous.set_enabled(first > 0)
        self._next.set_enabled(end < len(found.chosen))
        ui.navigate.history.replace(asked.address(self._opened.name))


def _draw(chart: ui.echart, options: dict[str, object]) -> None:
    chart.options.clear()
    chart.options.update(options)
    chart.update()


def _by_iteration(answers: Sequence[Answer]) -> dict[str, list[tuple[float, float]]]:
    """Mean, best and worst reward by iteration."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for answer in answers:
        if answer.reward is not None:
            rewards[answer.iteration].append(answer.reward)
    ordered = sorted(rewards.items())
    return {
        "mean": [(float(iteration), sum(many) / len(many)) for iteration, many in ordered],
        "best": [(float(iteration), max(many)) for iteration, many in ordered],
        "worst": [(float(iteration), min(many)) for iteration, many in ordered],
    }


async def show(client: Client, opened: OpenRun) -> None:
    with page(client, f"{opened.name}: answers", opened.name, "Answers"):
        iterations = await to_thread(opened.answers.iterations)
        query = dict(client.request.query_params) if client.request is not None else {}
        try:
            asked = Asked.of(query, iterations)
            asked.filter()
        except UsageError as error:
            html(part("problem", "The address cannot be read", str(error), link(opened.name, "answers")))
            return
        view = AnswersView(opened, asked, iterations)
        view.build()
        client.on_disconnect(view.stop)
        await view.look()
