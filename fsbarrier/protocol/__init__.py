"""The protocol: pure decisions from recorded facts and a time passed in. No I/O, no clock, no randomness."""
