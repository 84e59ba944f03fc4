"""Rollouts: task claims, agents and episodes, sampling from the engine, early end."""
