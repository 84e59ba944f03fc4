"""The simulator: the code that runs for real, on a simulated directory, in virtual time, deterministic from one seed."""
