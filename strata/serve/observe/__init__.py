"""What a server tells of itself: metrics, log lines, traces."""
