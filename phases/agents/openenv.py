"""An agent for environments that speak OpenEnv's protocol: JSON over one WebSocket for each episode. It does not import their library.

`rollout.agent=phases/agents/openenv.py:OpenEnv` with `environment.command='/path/to/its/python -m uvicorn MODULE:app --port {port}'`,
`environment.health=/health` and `environment.sessions_per_server=N`, the server's `max_concurrent_envs`. A task's field `reset` goes to the
environment's reset. `custom.observation` and `custom.action` name the fields of the environment's own types that the policy reads and
writes.
"""

from __future__ import annotations

import json
from typing import Any

import websockets

from fsbarrier.data.tasks import Task
from fsbarrier.rollouts.agents import Client, EnvironmentLost, Trajectory

#: maximum number of turns, unless `custom.turns` is given
TURNS = 8
#: errors for which neither the policy nor the agent is to blame
LOST = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")


class OpenEnv:
    """The policy answers each observation; the episode's reward is the sum of the environment's rewards."""

    async def run(self, task: Task, client: Client) -> Trajectory:
        read, write = (str(client.custom.get(name, "message")) for name in ("observation", "action"))
        url = f"{client.environment_url}/ws".replace("http://", "ws://")
        messages: list[dict[str, Any]] = [*task.messages]
        total, steps = 0.0, 0
        try:
            async with websockets.connect(url, max_size=None) as connection:
                seen = await answer(connection, "reset", task.metadata.get("reset") or {})
                first = messages.pop()
                messages.append({**first, "content": f"{first['content']}\n\n{seen['observation'][read]}"})
                while not seen.get("done") and steps < int(client.custom.get("turns", TURNS)):
                    reply = await client.chat(messages)
                    seen = await answer(connection, "step", {write: reply.text})
                    total, steps = total + (seen.get("reward") or 0.0), steps + 1
                    messages += [reply.message, {"role": "user", "content": str(seen["observation"][read])}]
        except (OSError, websockets.ConnectionClosed) as error:
            raise EnvironmentLost(f"{url}: {error}") from error
        return client.trajectory(reward=total, steps=steps)


async def answer(connection: websockets.ClientConnection, what: str, data: object) -> dict[str, Any]:
    """Send a reset or a step, and return the environment's observation."""
    await connection.send(json.dumps({"type": what, "data": data}))
    message = json.loads(await connection.recv())
    if message["type"] == "error":
        kind = EnvironmentLost if message["data"].get("code") in LOST else ValueError
        raise kind(f"{what}: {message['data'].get('message')}")
    observation: dict[str, Any] = message["data"]
    return observation
