"""How a trajectory is judged: exact and numeric match, math-verify, a function of one's own, a judge model."""
