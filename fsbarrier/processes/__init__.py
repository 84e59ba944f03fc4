"""Starts programs, monitors them and kills their process trees, so that none outlives its daemon; what they and it tell each other;
this machine's addresses and memory."""
