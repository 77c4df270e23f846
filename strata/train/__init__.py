"""One optimizer step, safely repeated."""
