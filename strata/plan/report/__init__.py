"""What an explanation looks like: one HTML page that needs nothing else, and a trace for Perfetto."""
