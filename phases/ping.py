"""The program that does nothing: fourteen barriers an iteration, to measure what coordination costs."""

from fsbarrier.program import PHASE_NAMES, RL_SLICES, Phase, Program

PROGRAM = Program("ping", tuple(Phase(index, name) for index, name in enumerate(PHASE_NAMES)), RL_SLICES)
