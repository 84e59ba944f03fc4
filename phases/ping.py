"""Fourteen barriers an iteration and no work, to measure the cost of coordination."""

from fsbarrier.program import PHASE_NAMES, RL_SLICES, Phase, Program

PROGRAM = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)), RL_SLICES)
