"""Imported by the process that the daemons of tests are forks of (forks.py): what they and their programs import."""

import http.server  # noqa: F401

import jinja2  # noqa: F401
import rich.console  # noqa: F401
import torch  # noqa: F401
import watchdog.observers  # noqa: F401

import fsbarrier.aggregate
import fsbarrier.cli
import fsbarrier.cli.start.begin
import fsbarrier.run.run_node
import fsbarrier.workers.helper
import fsbarrier.workers.toy  # noqa: F401
