"""What a run does when something goes wrong: bad numbers, ranks that hang, ranks that are slow."""
