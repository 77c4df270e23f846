"""Experts of a served mixture go where the load wants them: which slot holds which, and how weights get there."""
