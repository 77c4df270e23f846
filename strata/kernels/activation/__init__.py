"""What stands between the two products of an MLP."""
