"""How long steps take, what they cost and why: what was measured of devices, and models of nodes and of steps."""
