"""Arithmetic that needs no accelerator: what a model takes of its memory, and what a run of given settings comes to."""
