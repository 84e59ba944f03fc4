"""From flags and settings to a run that may begin: everything that is checked before anything starts."""
