"""Estimates that need no accelerator: the memory that a model takes, and the resources that a run of given settings needs."""
