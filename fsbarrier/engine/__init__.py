"""A node's vLLM servers: start, reload weights, release memory, stop."""
