"""The commands of `fsbarrier`, one file for each: parse, validate, call the core, show the result."""
