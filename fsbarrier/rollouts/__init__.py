"""Rolling out: who takes which task, episodes and agents, sampling from the engine, and when to stop."""
