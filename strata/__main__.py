"""`python -m strata` is the `strata` command."""

from strata.cli.main import main

main()
