"""What every request passes: the protocol, the gate, limits, errors and streams."""
