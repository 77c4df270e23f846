"""Measures Strata, and beside it other engines; none of it is in the package."""
