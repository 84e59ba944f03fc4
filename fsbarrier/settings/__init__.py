"""Defines every setting of a run, with its type, default and meaning; merges the values that users give, and checks them together."""
