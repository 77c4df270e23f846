"""What a start makes, and how long it takes."""
