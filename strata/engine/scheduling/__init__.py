"""Which sequences run how many tokens in which pages at each step. Nothing here loads torch."""
