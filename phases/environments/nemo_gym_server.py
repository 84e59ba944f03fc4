"""Runs a resources server of NeMo-Gym alone, without ray and hydra: `PYTHON nemo_gym_server.py PORT MODULE:CLASS [CONFIG]`.

PYTHON (3.12 or newer) has `pip install nemo-gym`. It needs nothing of fsbarrier. MODULE:CLASS is for example
`resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer`; CONFIG is a JSON object with the fields that the
server's configuration has beside the common ones. Servers that call models through NeMo-Gym are not supported.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import uvicorn
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig


def main(port: int, named: str, config: str = "{}") -> None:
    module, _, name = named.partition(":")
    kind: Any = getattr(importlib.import_module(module), name)
    here: dict[str, Any] = {"host": "127.0.0.1", "port": port}
    common = {**here, "entrypoint": "", "name": name, "domain": "other"}
    own = kind.model_fields["config"].annotation(**common, **json.loads(config))
    nobody = ServerClient(head_server_config=BaseServerConfig(**here), global_config_dict=DictConfig({}))
    uvicorn.run(kind(config=own, server_client=nobody).setup_webserver(), **here, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
