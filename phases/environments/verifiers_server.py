"""Serves an environment of verifiers (0.4 or newer) to hosted.py: `PYTHON verifiers_server.py PORT CONFIG.json`, as `environment.command`.

PYTHON has `pip install verifiers` and the taskset's own package. It needs nothing of fsbarrier. With a server's first episode, uv installs
verifiers' chat programs (harness null, for example), and asks the package index even if its cache has everything. CONFIG.json is
verifiers' configuration of an environment, without the model, for example

    {"taskset": {"id": "my_taskset"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}

`PYTHON verifiers_server.py --tasks DIR COUNT CONFIG.json` writes the first tasks of the taskset to train.jsonl: their field `index` is
the number of a task in the taskset, and no other field is used.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.utils.loaders import env_config_type, load_environment

#: verifiers takes keys only from environment variables; all episodes of a node have the same key.
KEY = "FSBARRIER_POLICY_KEY"


def environment(config: str) -> Any:
    settings = json.loads(Path(config).read_text())
    return load_environment(env_config_type(settings["taskset"]["id"]).model_validate(settings))


def write_tasks(folder: Path, count: int, config: str) -> None:
    with (folder / "train.jsonl").open("w") as out:
        for index, task in enumerate(islice(iter(environment(config).taskset), count)):
            prompt = task.data.prompt if isinstance(task.data.prompt, str) else f"task {index}"
            out.write(json.dumps({"prompt": prompt or f"task {index}", "index": index}) + "\n")


class Served:
    """Runs all episodes of this server in one environment."""

    def __init__(self, config: str) -> None:
        self.env = environment(config)
        self.tasks: list[Any] = []
        self.more = iter(self.env.taskset)

    @asynccontextmanager
    async def life(self, _: Starlette) -> AsyncIterator[None]:
        async with self.env.serving():
            yield

    async def episode(self, request: Request) -> JSONResponse:
        body = await request.json()
        os.environ[KEY] = body["api_key"]
        index = int(body["metadata"]["index"])
        self.tasks += islice(self.more, max(0, index + 1 - len(self.tasks)))
        client = EvalClientConfig(base_url=body["base_url"], api_key_var=KEY)
        (slot,) = self.env.slots(self.tasks[index])
        done = await self.env.run_slot(slot, ModelContext(model=body["model"], client=client))
        errors = [*done.errors, *(error for trace in done.traces for error in trace.errors)]
        if not done.ok or not done.traces:
            reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "no trace"
            return JSONResponse({"error": f"verifiers: {reason}"})
        trace = done.traces[0]
        return JSONResponse({"reward": float(trace.reward), "rewards": plain(trace.rewards)})


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


if __name__ == "__main__":
    if sys.argv[1] == "--tasks":
        write_tasks(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        served = Served(sys.argv[2])
        routes = [Route("/episode", served.episode, methods=["POST"])]
        uvicorn.run(
            Starlette(routes=routes, lifespan=served.life), port=int(sys.argv[1]), log_level="warning"
        )
