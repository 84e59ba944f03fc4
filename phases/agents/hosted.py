"""An agent for environments that run the whole episode themselves, and ask the policy over its OpenAI-compatible address.

`rollout.agent=phases/agents/hosted.py:Hosted` with an `environment.command` whose server answers `POST /episode`. It gets `base_url`,
`api_key` and `model` of the policy, for this episode only, and the task as `task_id`, `messages`, `answer` and `metadata`. It answers with
a JSON object: `reward`, `error` (then the episode is invalid), `lost` (true: it is begun again), and any other fields for the trajectory.
An example is phases/environments/verifiers_server.py.
"""

from __future__ import annotations

import httpx

from fsbarrier.data.tasks import Task
from fsbarrier.rollouts.agents import Client, EnvironmentLost, Trajectory


class Hosted:
    async def run(self, task: Task, client: Client) -> Trajectory:
        request = {
            **{"base_url": client.base_url, "api_key": client.api_key, "model": client.model},
            **{"task_id": task.task_id, "messages": task.messages, "answer": task.answer},
            "metadata": task.metadata,
        }
        try:
            # The request has no timeout of its own: the episode's time limit applies.
            async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
                answer = await http.post(f"{client.environment_url}/episode", json=request)
                answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EnvironmentLost(f"{client.environment_url}: {error!r}") from error
        result = answer.json()
        if result.get("error"):
            raise (EnvironmentLost if result.get("lost") else RuntimeError)(result["error"])
        return client.trajectory(**result)
