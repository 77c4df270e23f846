"""What runs the steps of an engine keeps between them."""
