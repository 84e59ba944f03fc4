"""A node's vLLM server: started, given new weights in place, released."""
