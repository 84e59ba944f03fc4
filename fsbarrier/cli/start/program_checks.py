"""Checks that a run's program can do what the settings ask, and that the user's own code, commands and packages are there."""

from __future__ import annotations

from collections.abc import Mapping

from fsbarrier.cli.start import preflight
from fsbarrier.errors import UsageError
from fsbarrier.program import Program
from fsbarrier.settings.sections import Settings

#: Settings that a program uses only if it needs a model or data (`Program.needs`).
USED_WITH = {
    "model": (
        "has no model",
        ("init_from", "trainer.command", "update.trajectories", "engine.url"),
    ),
    "data": ("does not read tasks", ("rollout.agent",)),
}


def check_slice(settings: Settings, program: Program) -> None:
    """Check that the program has the requested slice of phases."""
    chosen = settings.rl_phase
    if chosen != "both" and all(part.name != chosen for part in program.slices):
        raise UsageError(f"--rl-phase {chosen}: not supported by program {program.name}; drop it")


def check_used(typed: Settings, program: Program) -> None:
    """Raises UsageError for a setting that the program would silently ignore."""
    given = typed.flat()
    for need, (without_it, names) in USED_WITH.items():
        for name in names if need not in program.needs else ():
            if (value := given[name]) is not None:
                raise UsageError(f"{name}={value}: program {program.name} {without_it}; drop it")


def check_own(settings: Settings, program: Program, environ: Mapping[str, str]) -> None:
    """Check the user's reward, judge, agent, engine, trainer and notification settings."""
    if "data" in program.needs:
        preflight.check_reward(settings.reward.kind)
        preflight.check_judge(settings, environ)
        preflight.check_agent(settings.rollout.agent)
    if "model" in program.needs:
        preflight.check_engine(settings, environ)
        preflight.check_replay(settings)
    preflight.check_trainer(settings.trainer.command)
    if settings.notify.command is not None:
        preflight.check_command("notify.command", settings.notify.command)


def check_packages(settings: Settings, program: Program, environ: Mapping[str, str]) -> None:
    """Check that the packages are there that the run's programs need; what only shows runs needs none."""
    preflight.check_packages(settings, program.needs, environ)
