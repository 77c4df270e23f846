"""What config.json says of layers that keep a state of fixed size."""
