"""The tests of a code task, in the public formats of APPS, LiveCodeBench and verl's `prime_code`, and what passes them.

A test gives a program text on its standard input, or calls one of its functions with arguments. Here tests are read, the program is taken
out of an answer, and what a program gave is compared with what was expected. Nothing is run.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import pickletools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: the largest unpacked text of LiveCodeBench's hidden tests
MOST_BYTES = 256 << 20
#: relative tolerance of a number with a decimal point or an exponent
TOLERANCE = 1e-6

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)
_FRACTION = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?")
_LANGUAGES = ("", "py", "python", "python3")


class NoTests(ValueError):
    """A task has no tests that can be read. The message says why."""


@dataclass(frozen=True, slots=True)
class Tests:
    """`function`: the name of the function to call, also of a class `Solution`; None: the program reads its standard input.

    `inputs`: for each test, the text on standard input, or the list of arguments; `outputs`: what is expected.
    """

    function: str | None
    inputs: Sequence[Any]
    outputs: Sequence[Any]


def tests_of(answer: object, metadata: Mapping[str, object]) -> Tests:
    """A task's tests: its answer, or else APPS's `input_output`, or LiveCodeBench's test cases. Raises NoTests."""
    given = answer if answer is not None else metadata.get("input_output")
    if given is None and "public_test_cases" in metadata:
        cases = [*_list(metadata["public_test_cases"]), *_list(metadata.get("private_test_cases"))]
        return _of_cases(cases, _value(metadata.get("metadata") or {}))
    value = _value(given)
    if isinstance(value, list):
        return _of_cases(value, _value(metadata.get("metadata") or {}))
    if not isinstance(value, Mapping) or "inputs" not in value or "outputs" not in value:
        raise NoTests(
            "has no tests: its answer must be an object with inputs and outputs, or a list of test cases"
        )
    return _checked(value.get("fn_name"), value["inputs"], value["outputs"])


def problem_of(answer: object, metadata: Mapping[str, object]) -> str | None:
    """Why a task cannot be scored."""
    try:
        tests_of(answer, metadata)
    except NoTests as error:
        return f"reward.kind=code: the task {error}"
    return None


def _of_cases(cases: Sequence[object], about: object) -> Tests:
    """LiveCodeBench's form: a list of {"input", "output", "testtype"}."""
    kinds = {str(case.get("testtype", "stdin")) if isinstance(case, Mapping) else "" for case in cases}
    if not kinds <= {"stdin", "functional"} or len(kinds) > 1:
        raise NoTests(
            f"has test cases of the kinds {', '.join(sorted(kinds))}; all must be stdin, or all functional"
        )
    name = about.get("func_name") if isinstance(about, Mapping) else None
    if kinds == {"functional"} and name is None:
        raise NoTests("has functional test cases, and no func_name in its metadata")
    read = [case for case in cases if isinstance(case, Mapping)]
    return _checked(
        name if kinds == {"functional"} else None,
        [case.get("input") for case in read],
        [case.get("output") for case in read],
    )


def _checked(function: object, inputs: object, outputs: object) -> Tests:
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or len(inputs) != len(outputs)
        or not inputs
    ):
        raise NoTests("must have as many outputs as inputs, and at least one")
    if not function:
        return Tests(None, [_text(given) for given in inputs], [_text(expected) for expected in outputs])
    if not isinstance(function, str) or not function.isidentifier():
        raise NoTests(f"has fn_name={str(function)[:60]!r}, which is no name of a function")
    return Tests(
        function, [_arguments(given) for given in inputs], [_value(expected) for expected in outputs]
    )


def _text(value: object) -> str:
    """A test's input or output as text. APPS sometimes has a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise NoTests(f"has a test whose input or output is no text: {str(value)[:60]}")
    return value


def _arguments(value: object) -> list[object]:
    """The arguments of a call: a list, or in LiveCodeBench a text with one argument a line."""
    if isinstance(value, str):
        return [_value(line) for line in value.split("\n")]
    if not isinstance(value, list):
        raise NoTests(f"has a test whose arguments are no list: {str(value)[:60]}")
    return value


def _value(given: object) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json_value(given)
    except ValueError as error:
        raise NoTests(f"has tests that are not JSON: {error}") from None


def json_value(text: str) -> Any:
    """A value of JSON, whose whole numbers may have up to 4300 digits, unlike those of foreign_json.py. Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _list(given: object) -> list[object]:
    """A list of test cases, as a value or as JSON; or, for the hidden ones, as base64 of a compressed pickle of JSON."""
    if isinstance(given, str) and not given.lstrip().startswith("["):
        given = _unpacked(given)
    value = [] if given is None else _value(given)
    if not isinstance(value, list):
        raise NoTests(f"has test cases that are no list: {str(value)[:60]}")
    return value


def _unpacked(given: str) -> str:
    """The text in LiveCodeBench's pickle, which is read without running anything in it."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(given), MOST_BYTES)
        texts = [value for _, value, _ in pickletools.genops(data) if isinstance(value, str)]
    except (binascii.Error, zlib.error, ValueError):
        texts = []
    if len(texts) != 1:
        raise NoTests("has private_test_cases that are neither JSON nor LiveCodeBench's compressed text")
    return texts[0]


def program_of(response: str) -> str:
    """The program in an answer: its last block of Python after any reasoning, or the whole text if it has no block."""
    text = response.rpartition("</think>")[2]
    blocks: list[tuple[str, str]] = _BLOCK.findall(text)
    ours = [program for language, program in blocks if language.lower() in _LANGUAGES]
    return ours[-1] if ours else "" if blocks else text


def printed_right(got: str, expected: str) -> bool:
    """Whether a program printed what was expected, ignoring white space at the ends of lines and of the whole text."""
    have, want = (_lines(text) for text in (got, expected))
    return len(have) == len(want) and all(map(_same_line, have, want))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


def _same_line(got: str, expected: str) -> bool:
    if got == expected:
        return True
    have, want = got.split(), expected.split()
    return len(have) == len(want) and all(map(_same_word, have, want))


def _same_word(got: str, expected: str) -> bool:
    if got == expected:
        return True
    if not _FRACTION.fullmatch(expected):
        return False
    try:
        return _close(float(got), float(expected))
    except ValueError:
        return False


def returned_right(got: object, expected: object) -> bool:
    """Whether a function returned what was expected, which APPS may put into a list."""
    return _equal(got, expected) or (
        isinstance(expected, list) and len(expected) == 1 and _equal(got, expected[0])
    )


def _equal(got: Any, expected: Any) -> bool:
    # True is no 1 here.
    if isinstance(got, bool) or isinstance(expected, bool):
        return got is expected
    match got, expected:
        case list(), list():
            return len(got) == len(expected) and all(map(_equal, got, expected))
        case dict(), dict():
            return got.keys() == expected.keys() and all(_equal(got[key], expected[key]) for key in got)
        case (float(), float() | int()) | (int(), float()):
            return _close(got, expected)
    return bool(got == expected)


def _close(got: float, expected: float) -> bool:
    try:
        return math.isclose(got, expected, rel_tol=TOLERANCE, abs_tol=1e-9)
    except OverflowError:
        # A whole number beyond any float.
        return False
