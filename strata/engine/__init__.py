"""One inference step, again and again: requests, the scheduler, the runner and the loop that joins them."""
