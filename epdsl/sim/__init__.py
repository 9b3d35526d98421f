"""The simulator's scheduler, written in the language and compiled for the host."""
