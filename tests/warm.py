"""Imported by the process that daemons and trainers of tests are forks of (forks.py): what they and their programs import."""

import gc
import http.server  # noqa: F401

import jinja2  # noqa: F401
import rich.console  # noqa: F401
import torch.distributed.checkpoint  # noqa: F401
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
import watchdog.observers  # noqa: F401

import fsbarrier.aggregate
import fsbarrier.cli
import fsbarrier.cli.start.begin
import fsbarrier.run.run_node
import fsbarrier.workers.examples
import fsbarrier.workers.helper
import fsbarrier.workers.prepare
import fsbarrier.workers.rollout
import fsbarrier.workers.toy
import fsbarrier.workers.update  # noqa: F401

# All of it stays: a fork that looked for garbage among it would copy each page.
gc.freeze()
