"""Processes that we start: watched, ended by their group, none outliving its daemon; and the memory they held."""
