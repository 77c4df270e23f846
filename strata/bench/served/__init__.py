"""A served load inside this process: requests come at their times, and every step and every token is timed."""
