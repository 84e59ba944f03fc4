"""A credential in a setting that is a command is refused, and never shown."""

from __future__ import annotations

import sys

import pytest
from commands import typed

from fsbarrier.settings.secrecy import credential_in

SECRET = "hunter2-very-private"


@pytest.mark.parametrize(
    "setting",
    [
        f"notify.command=curl --token {SECRET} http://x",
        f"notify.command=curl -H 'Authorization: Bearer {SECRET}' http://x",
        f"notify.command=env SLACK_TOKEN={SECRET} true",
        f"notify.command=curl http://me:{SECRET}@host/hook",
        f"trainer.command={sys.executable} train.py --wandb-api-key={SECRET} {{out}}",
        f"environment.command={sys.executable} server.py --password {SECRET} {{port}}",
        f"""engine.extra_args='--api-key {SECRET}'""",
    ],
)
def test_a_credential_in_a_command_is_refused_and_not_shown(setting: str, tmp_path: object) -> None:
    for more in ((), ("--dry-run",)):
        said = typed("run", "--log-path", f"{tmp_path}/run", *more, setting, code=2)
        assert SECRET not in said.out + said.err
        assert f"{setting.partition('=')[0]}: what looks like a credential" in said.err
        assert "environment of the daemon" in said.err


@pytest.mark.parametrize(
    "command",
    [
        "curl --data @- http://hooks/x",
        "--max-num-batched-tokens 4096 --max-num-seqs 8",
        "serve --api-key-env JUDGE_API_KEY --token-file /run/secret --key $KEY",
        "serve --kv-cache-dtype fp8 --tokenizer-mode mistral-tokenizer",
        "python train.py --spec {spec} --out {out}",
        '--hf-overrides {"rope_scaling": {"type": "dynamic-ntk"}}',
    ],
)
def test_other_commands_are_none(command: str) -> None:
    assert credential_in(command) == ""
