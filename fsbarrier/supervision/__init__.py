"""Starts programs, watches them and ends all their processes, so that none outlives its daemon; and the files of that contract."""
