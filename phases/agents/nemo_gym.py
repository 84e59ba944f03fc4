"""An agent for the resources servers of NeMo-Gym: a task's tools are its paths, and it verifies the episode. Does not import NeMo-Gym.

`rollout.agent=phases/agents/nemo_gym.py:NemoGym` with `environment.command='/path/to/its/python nemo_gym_server.py {port} MODULE:CLASS'`
(phases/environments). A task is a row of a NeMo-Gym file with two more fields: `prompt`, a copy of
`responses_create_params.input`, and an arbitrary `answer`, which is not read.
"""

from __future__ import annotations

import json
from typing import Any

import httpx

from fsbarrier.data.tasks import Task
from fsbarrier.rollouts.agents import Client, EnvironmentLost, Reply, Trajectory

#: maximum number of turns, unless `custom.turns` is given
TURNS = 16


class NemoGym:
    """The policy calls tools until it calls none; the server computes the reward at the end."""

    async def run(self, task: Task, client: Client) -> Trajectory:
        row = task.metadata
        given = row["responses_create_params"].get("tools") or []
        # The Responses API describes a tool in a flat object, the chat API in a nested one.
        tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in given]
        messages: list[dict[str, Any]] = [*task.messages]
        done: list[dict[str, Any]] = []
        try:
            # A cookie identifies the session. Tools have no timeout of their own: the episode's time limit applies.
            url = client.environment_url
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=None) as server:
                (await server.post("/seed_session", json=row)).raise_for_status()
                for _ in range(int(client.custom.get("turns", TURNS))):
                    reply = await client.chat(messages, tools=tools or None)
                    messages.append(reply.message)
                    done += said(reply, len(done))
                    for call in reply.tool_calls:
                        result = await called(server, call["function"], {tool["name"] for tool in given})
                        done.append({"type": "function_call_output", "call_id": call["id"], "output": result})
                        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                    if not reply.tool_calls:
                        break
                response = {
                    **{"id": task.task_id, "object": "response", "created_at": 0, "model": client.model},
                    **{"output": done, "tools": given, "tool_choice": "auto", "parallel_tool_calls": True},
                }
                verified = await server.post("/verify", json={**row, "response": response})
        except httpx.HTTPError as error:
            raise EnvironmentLost(f"{client.environment_url}: {error!r}") from error
        if not verified.is_success:
            raise ValueError(f"/verify: {verified.status_code} {verified.text[:500]}")
        return client.trajectory(reward=float(verified.json()["reward"]))


async def called(server: httpx.AsyncClient, function: dict[str, Any], tools: set[str]) -> str:
    """A tool's answer. A wrong call gets an error message, from which the policy is to learn."""
    if function["name"] not in tools:
        return f"error: there is no tool {function['name']}"
    answer = await server.post(f"/{function['name']}", json=json.loads(function["arguments"]))
    return answer.text


def said(reply: Reply, number: int) -> list[dict[str, Any]]:
    """The items of a response that stand for a reply."""
    text = {"type": "output_text", "text": reply.text, "annotations": []}
    kind = {"type": "message", "role": "assistant", "status": "completed"}
    calls = [
        {"type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]}
        for call in reply.tool_calls
    ]
    return calls or [{**kind, "id": f"message-{number}", "content": [text]}]
