"""The engine's own scheduler, loop and router under a clock of their own, with predicted times of steps."""
