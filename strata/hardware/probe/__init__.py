"""The ceilings of this machine, measured: what memory, products, attention, launches and copies reach."""
