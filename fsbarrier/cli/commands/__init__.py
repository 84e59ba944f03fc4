"""One file a command of `fsbarrier`: parse, validate, call the core, show the result."""
