"""A node's accelerators and the vLLM servers on them: start, reload weights, release memory, stop."""
