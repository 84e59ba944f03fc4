"""The smallest agent: one turn."""

from typing import Any


class Agent:
    async def run(self, task: Any, client: Any) -> None:
        await client.chat([{"role": "user", "content": task.prompt}])


agent = Agent()
