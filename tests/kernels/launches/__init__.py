"""Launches that tests compile for a GPU that is not there: calls on the meta device, whose kernels are noted."""
