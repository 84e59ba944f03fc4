"""An agent that uses a web browser by looking at it, as WebGym's does: a screenshot, an action, the next screenshot, until it answers.

`rollout.agent=phases/agents/browser.py:Browser` with
`environment.command='/path/to/its/python phases/environments/browser_server.py {port}'` (the browser; see there what it needs)
and `environment.sessions_per_server=N`. A task's field `url` says where to begin, `difficulty` how many steps there may be. What the policy
answers is scored as any answer is (`reward.kind`); without an answer it is an empty one.
"""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import websockets

from fsbarrier.data.images import text_of
from fsbarrier.data.tasks import Task
from fsbarrier.rollouts.agents import Client, EnvironmentLost, Trajectory

#: The policy sees the current round and the ones just before it.
WINDOW = 4
#: steps for a task of at most this difficulty
STEPS = ((3, 10), (6, 20), (1000, 30))
HOW = """You use a web browser. Each message shows its window, 1280 pixels wide and 768 high. Think, and end with a line that is one action:
click X Y
type X Y TEXT (clicks, replaces what is there and presses Enter)
scroll PIXELS (down; negative: up)
back
wait
answer TEXT (ends the task)"""


class Browser:
    """One episode is one private window of the browser."""

    async def run(self, task: Task, client: Client) -> Trajectory:
        url = client.environment_url.replace("http://", "ws://")
        try:
            # There is no ping timeout, because a page may be busy: the episode's time limit applies.
            async with websockets.connect(url, max_size=None, ping_timeout=None) as window:
                return await browse(window, task, client)
        except (OSError, websockets.ConnectionClosed) as error:
            raise EnvironmentLost(f"{url}: {error}") from error


async def browse(window: websockets.ClientConnection, task: Task, client: Client) -> Trajectory:
    question = text_of(task.messages[-1]["content"])
    system = {"role": "system", "content": f"{HOW}\n\nYour task: {question}"}
    rounds: list[list[dict[str, Any]]] = []
    seen = await after(window, {"do": "open", "url": task.metadata.get("url", "/")})
    if seen["error"]:
        raise EnvironmentLost(f"the first page: {seen['error']}")
    answer, wrong = "", 0
    difficulty = int(task.metadata.get("difficulty", 1))
    for _ in range(next(steps for most, steps in STEPS if difficulty <= most)):
        text = {"type": "text", "text": f"{seen['url']} {seen['error']}".strip()}
        shown = {"role": "user", "content": [{"type": "image", "image": seen["image"]}, text]}
        # Dropping the oldest round begins a new segment of the trajectory (docs/agents.md).
        reply = await client.chat([system, *chain(*rounds[1 - WINDOW :]), shown])
        rounds.append([shown, reply.message])
        action = parsed(reply.text)
        if action is None:
            wrong, seen = wrong + 1, {**seen, "error": "(this was no action)"}
        elif action["do"] == "answer":
            answer = action["text"]
            break
        else:
            seen = await after(window, action)
    return client.trajectory(text=answer, steps=len(rounds), no_actions=wrong, url=seen["url"])


def parsed(reply: str) -> dict[str, Any] | None:
    """The action in the last line."""
    line = (reply.strip().splitlines() or [""])[-1].strip()
    try:
        match line.split(maxsplit=3):
            case ["click", x, y]:
                return {"do": "click", "x": int(x), "y": int(y)}
            case ["type", x, y, text]:
                return {"do": "type", "x": int(x), "y": int(y), "text": text}
            case ["scroll", pixels]:
                return {"do": "scroll", "y": int(pixels)}
            case ["back" | "wait" as what]:
                return {"do": what}
            case ["answer", _, *_]:
                return {"do": "answer", "text": line.removeprefix("answer").strip()}
    except ValueError:
        pass
    return None


async def after(window: websockets.ClientConnection, action: dict[str, Any]) -> dict[str, Any]:
    """Do an action and return what the window then shows: `url`, `image`, and `error` if the action failed, else ""."""
    await window.send(json.dumps(action))
    seen: dict[str, Any] = json.loads(await window.recv())
    return seen
