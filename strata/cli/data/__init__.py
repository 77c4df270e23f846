"""`strata data`: its options, and the rows that --preview prints."""
