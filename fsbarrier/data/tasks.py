"""Reads and validates task files. examples.py reads files of examples for supervised fine-tuning.

A task file is JSON lines (`.jsonl`), or Parquet with verl's columns. Each line (row) is one task. Its number, counted from 0, is the task's
index throughout a run, so a file must not change while a run uses it. Fields:

    prompt    text, or chat messages [{"role": "user", "content": "..."}, ...]. A content may be a list of parts,
              {"type": "text", "text": "..."} and {"type": "image", "image": a path relative to the file, or a data: URL}; or, as in
              verl, a field `images` has the images for each `<image>` in the texts. Messages may have the fields in messages.py
    tools     optional; the tools that the chat template shows to the policy, as OpenAI's API has them
    chat_template_kwargs   optional; arguments of the chat template for this task
    answer    the reference for the reward; or `reward_model.ground_truth` as in verl. null or missing: no reference, which
              requires a reward that needs none, or an agent that gives it
    task_id   optional; default: file name and index
    (others)  the task's metadata, passed to the reward function and stored with each trajectory
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsbarrier.data import images
from fsbarrier.data.images import Message
from fsbarrier.data.messages import checked
from fsbarrier.errors import UsageError, first_line
from fsbarrier.store.reading import TASK_BYTES
from fsbarrier.wording import printable

SUFFIXES = (".jsonl", ".parquet")
#: maximum length of an invalid value in a message
SHOWN = 60
#: nesting limit of answers and metadata; trajectory files allow twice as much
MAX_NESTING = 100
#: rows of a Parquet file in memory at a time
BATCH_ROWS = 1024

#: fields that a message may have instead of a content
_INSTEAD = ("tool_calls", "reasoning_content")
_KINDS = {list: "a list of tools", dict: "an object"}


@dataclass(frozen=True)
class Task:
    """One task. `prompt`: text, or chat messages in order; `metadata`: the other fields as plain values."""

    index: int
    task_id: str
    prompt: str | tuple[Message, ...]
    #: as given in the file
    answer: Any
    metadata: Mapping[str, Any]
    #: the name of its evaluation set; "" if there is only one set
    eval_set: str = ""
    #: passed to the chat template beside the messages
    tools: tuple[dict[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """The prompt as chat messages; a text prompt becomes one user message."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    @property
    def template(self) -> dict[str, Any]:
        """The inputs of the chat template beside the messages, as parameters of vLLM's API."""
        return _template(self.tools, self.chat_template_kwargs)

    @property
    def has_images(self) -> bool:
        return not isinstance(self.prompt, str) and any(images.sources(self.prompt))


def _template(tools: tuple[dict[str, Any], ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **({"tools": list(tools)} if tools else {}),
        **({"chat_template_kwargs": dict(arguments)} if arguments else {}),
    }


@dataclass(frozen=True, slots=True)
class TaskFile:
    """The tasks read from `path`, by index; `count`: number of tasks in the whole file."""

    path: Path
    count: int
    tasks: Mapping[int, Task]


def read_tasks(path: Path, indices: Collection[int] | None = None) -> TaskFile:
    """Read and validate all tasks, or only those with `indices`; other lines are only counted.

    Raises UsageError naming the file and line: unreadable, not JSON, a missing field or wrong type, a duplicate task_id, an index that
    does not exist.
    """
    wanted = None if indices is None else frozenset(indices)
    count, tasks = 0, {}
    for index, task in _checked_tasks(path, wanted):
        count = index + 1
        if task is not None:
            tasks[index] = task
    if wanted is not None and (absent := wanted - tasks.keys()):
        raise UsageError(f"{path}: has {count} tasks, so none with index {min(absent)}; did the file change?")
    return TaskFile(path, count, tasks)


def _checked_tasks(path: Path, wanted: frozenset[int] | None) -> Iterator[tuple[int, Task | None]]:
    seen: dict[str, int] = {}
    for index, row in rows_of(path, wanted):
        if row is None:
            yield index, None
            continue
        with unusual_values_named(path, index):
            task = _task(path, index, row)
            encoded(task.task_id, task.messages, task.tools, task.chat_template_kwargs)
        first = seen.setdefault(task.task_id, index)
        if first != index:
            already = f"task_id {shown(task.task_id)} is already used by {place(path, first)}"
            raise task_error(path, index, already)
        yield index, task


def encoded(*values: object) -> bytes:
    """Values as they are sent to an engine. Raises RecursionError, UnicodeEncodeError."""
    return json.dumps(values, ensure_ascii=False).encode()


@contextmanager
def unusual_values_named(path: Path, index: int) -> Iterator[None]:
    """While a row is read and `encoded`: raises UsageError naming the row where a value cannot be sent to an engine."""
    try:
        yield
    except RecursionError:
        raise task_error(path, index, "is nested too deeply") from None
    except UnicodeEncodeError:
        raise task_error(path, index, "contains an unpaired surrogate (\\ud800 to \\udfff)") from None


# --- rows -----------------------------------------------------------------------------------------------------------------


def rows_of(path: Path, wanted: frozenset[int] | None) -> Iterator[tuple[int, Mapping[str, object] | None]]:
    """Each row with its index; None for rows that are not needed."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path}: a task file must end in {' or '.join(SUFFIXES)}")
    try:
        yield from (_parquet_rows if path.suffix == ".parquet" else _json_rows)(path, wanted)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the file: {error.strerror or first_line(error)}") from None


def _json_rows(
    path: Path, wanted: frozenset[int] | None
) -> Iterator[tuple[int, Mapping[str, object] | None]]:
    empty: int | None = None
    with path.open("rb") as stream:
        # Limit the line length: a sparse file without content would be one line of any length.
        for index, line in enumerate(iter(lambda: stream.readline(TASK_BYTES + 1), b"")):
            if len(line) > TASK_BYTES:
                raise task_error(path, index, f"is longer than {TASK_BYTES >> 20} MiB")
            if not line.strip():
                empty = index if empty is None else empty
                continue
            # Empty lines are only allowed at the end of a file, because they would shift the indices.
            if empty is not None:
                raise task_error(path, empty, "is empty")
            yield index, None if wanted is not None and index not in wanted else _parsed(path, index, line)


def _parsed(path: Path, index: int, line: bytes) -> Mapping[str, object]:
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except UnicodeDecodeError:
        raise task_error(path, index, "is not UTF-8") from None
    except ValueError as error:
        reason = (
            f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        )
        # A file that begins like this is one list or one object, over several lines.
        whole = index == 0 and line.strip() in (b"[", b"{")
        advice = "; write each task on a line of its own" if whole else ""
        raise task_error(path, index, f"is not JSON: {reason}{advice}") from None
    except RecursionError:
        raise task_error(path, index, "is not JSON: nested too deeply") from None
    if not isinstance(row, dict):
        raise task_error(path, index, f"must be a JSON object, got {shown(row)}")
    return row


def _no_constant(name: str) -> object:
    """Reject NaN and infinities, which Python's library accepts although they are not JSON. As answers they would never match."""
    raise ValueError(f"{name} is no JSON value")


def _parquet_rows(
    path: Path, wanted: frozenset[int] | None
) -> Iterator[tuple[int, Mapping[str, object] | None]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError(
            f"{path}: reading Parquet needs the package pyarrow, which is not installed on this node"
        ) from None
    try:
        table = parquet.ParquetFile(path, page_checksum_verification=True)
        index = 0
        for batch in table.iter_batches(batch_size=BATCH_ROWS):
            for offset in range(batch.num_rows):
                here = wanted is None or index in wanted
                yield index, batch.slice(offset, 1).to_pylist()[0] if here else None
                index += 1
        # pyarrow does not report some kinds of damage: the rows just end early.
        if index != table.metadata.num_rows:
            raise UsageError(
                f"{path}: is damaged: only {index} of its {table.metadata.num_rows} rows are readable"
            )
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path}: not a valid Parquet file: {first_line(error)}") from None


# --- one task -------------------------------------------------------------------------------------------------------------


def _task(path: Path, index: int, row: Mapping[str, object]) -> Task:
    rest = dict(row)
    if rest.get("prompt", "") is None:
        raise task_error(path, index, "prompt is null")
    if "prompt" not in rest:
        known = ", ".join(map(str, row)) or "none"
        raise task_error(path, index, f"has no field prompt (its fields: {known})")
    prompt = prompt_of(path, index, rest.pop("prompt"), may_see=True)
    if rest.get("images") is not None and not isinstance(prompt, str):
        try:
            prompt = images.in_places(prompt, rest.pop("images"), path.parent)
        except ValueError as error:
            raise task_error(path, index, str(error)) from None
    elif rest.get("images") and images.MARK in prompt:
        raise task_error(path, index, "has images, and its prompt is text; give chat messages")
    task_id = rest.pop("task_id", None)
    if task_id is None:
        task_id = f"{path.stem}-{index}"
    if isinstance(task_id, bool) or not isinstance(task_id, str | int) or task_id == "":
        raise task_error(path, index, f"task_id must be text or a whole number, got {shown(task_id)}")
    answer = _answer(rest)
    tools, arguments = beside_of(path, index, rest, chat=not isinstance(prompt, str))
    metadata = {str(name): plain(value) for name, value in rest.items()}
    return Task(index, str(task_id), prompt, plain(answer), metadata, "", tools, arguments)


def prompt_of(
    path: Path, index: int, value: object, name: str = "prompt", *, may_see: bool = False
) -> str | tuple[Message, ...]:
    """A text, or the messages of a conversation, in the field `name`. `may_see`: images are allowed."""
    if isinstance(value, str):
        if not value.strip():
            raise task_error(path, index, f"{name} is blank" if value else f"{name} is empty")
        return value
    if not isinstance(value, list):
        raise task_error(path, index, f"{name} must be text or a list of chat messages, got {shown(value)}")
    if not value:
        raise task_error(path, index, f"{name} is an empty list")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise task_error(path, index, f"{name}: message {number} must be an object, got {shown(message)}")
        role, content = message.get("role"), message.get("content")
        where = f"{name}: message {number}"
        if not isinstance(role, str) or not role:
            raise task_error(path, index, f"{where} needs a role (text), got {shown(role)}")
        try:
            plain_message = checked(_without_nulls(message) if path.suffix == ".parquet" else message)
        except ValueError as error:
            raise task_error(path, index, f"{where} {error}") from None
        if isinstance(content, list) and may_see:
            content = [_part(path, index, f"{where}, part {n}", part) for n, part in enumerate(content, 1)]
        elif not isinstance(content, str) and (content is not None or not plain_message.keys() & {*_INSTEAD}):
            raise task_error(path, index, f"{where} needs a content (text), got {shown(content)}")
        messages.append({**plain_message, "role": role, "content": content or ""})
    if not any(
        images.text_of(message["content"]).strip()
        or any(images.sources([message]))
        or message.keys() & {*_INSTEAD}
        for message in messages
    ):
        raise task_error(path, index, f"{name}: all messages are blank")
    return tuple(messages)


def beside_of(
    path: Path, index: int, row: dict[str, object], *, chat: bool
) -> tuple[tuple[dict[str, Any], ...], Mapping[str, Any]]:
    """Remove the fields `tools` and `chat_template_kwargs` from the row and return them. In Parquet they may be JSON text."""
    values: list[Any] = []
    for name, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.pop(name, None)
        try:
            value = (
                json.loads(value, parse_constant=_no_constant) if isinstance(value, str) and value else value
            )
        except (ValueError, RecursionError):
            raise task_error(path, index, f"{name} is not JSON: {shown(value)}") from None
        value = plain(_without_nulls(value)) if path.suffix == ".parquet" else value
        if value and not isinstance(value, kind):
            raise task_error(path, index, f"{name} must be {_KINDS[kind]}, got {shown(value)}")
        if value and not chat:
            raise task_error(
                path, index, f"has {name}, and its prompt is text, which no chat template renders"
            )
        values.append(value or kind())
    for number, tool in enumerate(values[0], 1):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise task_error(
                path, index, f"tools: tool {number} needs function.name (text), got {shown(tool)}"
            )
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in values[0]]
    return tuple(tools), values[1]


def _without_nulls(value: Any) -> Any:
    """Drop null fields: in Parquet each object of a column has all fields that occur in any of them."""
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _part(path: Path, index: int, where: str, part: object) -> dict[str, object]:
    """One part of a message's content."""
    try:
        return images.part(part, path.parent)
    except ValueError as error:
        raise task_error(path, index, f"{where} {error}") from None


def in_set(where: str | None) -> Callable[[Task], bool]:
    """Make a predicate: whether a task belongs to a set of training tasks (`train.sets.NAME.where`)."""
    field, _, wanted = (where or "").partition("=")
    number = r"(-?\d+(?:\.\d+)?)?"
    span = re.fullmatch(f"{number}:{number}", wanted)
    least, most = (float(span[1] or "-inf"), float(span[2] or "inf")) if span else (0.0, 0.0)

    def fits(task: Task) -> bool:
        value = task.metadata.get(field)
        if span is None:
            return where is None or str(value) == wanted
        return isinstance(value, int | float) and least <= value <= most

    return fits


def _answer(rest: dict[str, object]) -> object:
    own, model = rest.pop("answer", None), rest.get("reward_model")
    return model.get("ground_truth") if own is None and isinstance(model, Mapping) else own


def plain(value: object, depth: int = 0) -> object:
    """The value as stored in trajectories: JSON types only; other Parquet types (dates, bytes, decimals) as text.

    Raises RecursionError for excessive nesting.
    """
    if depth > MAX_NESTING:
        raise RecursionError
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner, depth + 1) for inner in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return str(value)


def task_error(path: Path, index: int, what: str) -> UsageError:
    """An error about a task, with its position."""
    return UsageError(f"{place(path, index)}: {printable(what)}")


def place(path: Path, index: int) -> str:
    """A task's position: line numbers start at 1, as in editors; Parquet rows at 0, as in its readers."""
    return f"{path}, row {index}" if path.suffix == ".parquet" else f"{path}, line {index + 1}"


def shown(value: object) -> str:
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
