"""`strata bench`: a command a file, and what they share."""
