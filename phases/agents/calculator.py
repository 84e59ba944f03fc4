"""An agent with a calculator: the policy may ask for a result as often as it likes, up to a number of turns.

`rollout.agent=phases/agents/calculator.py:Calculator`. A worked example for docs/agents.md: copy it and edit it.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable
from typing import Any

from fsbarrier.data.tasks import Task
from fsbarrier.rollouts.agents import Client, Trajectory

#: maximum number of turns, unless `custom.turns` is given
TURNS = 4
#: the largest absolute value of a result, and so of the base of a power
BIGGEST = 10**12

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "The value of an arithmetic expression with + - * / ** and parentheses.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


class Calculator:
    """Answers every call of the tool; ends when the policy calls none, or has had its turns."""

    async def run(self, task: Task, client: Client) -> Trajectory:
        messages: list[dict[str, Any]] = task.messages
        calls = 0
        for _ in range(int(client.custom.get("turns", TURNS))):
            reply = await client.chat(messages, tools=[TOOL])
            messages.append(reply.message)
            if not reply.tool_calls or reply.finish_reason != "stop":
                break
            for call in reply.tool_calls:
                calls += 1
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": answered(call)})
        return client.trajectory(calls=calls)


def answered(call: dict[str, Any]) -> str:
    """The tool's answer. A wrong call gets an error message: the policy is to learn from it, and the agent has not failed."""
    function = call["function"]
    if function["name"] != "calculator":
        return f"error: there is no tool {function['name']}"
    try:
        return f"{value(str(json.loads(function['arguments'])['expression'])):g}"
    except (ValueError, KeyError, TypeError, SyntaxError, ArithmeticError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def value(expression: str) -> float:
    """The value of an expression of numbers; names and calls are refused. Raises the errors that `answered` catches."""
    if len(expression) > 200:
        raise ValueError("too long")
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            result = float(number)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            one, other = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(other) > 64:
                raise ValueError("too large")
            result = OPERATORS[type(op)](one, other)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(operand))
        case _:
            raise ValueError("not arithmetic")
    if isinstance(result, complex) or not abs(result) <= BIGGEST:
        raise ValueError("too large")
    return result
