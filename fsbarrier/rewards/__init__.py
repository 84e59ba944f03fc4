"""Rewards: exact and numeric match, math-verify, user functions, a judge model."""
