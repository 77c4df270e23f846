"""`strata eval`: its options, and the table that it prints."""
