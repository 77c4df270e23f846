"""What a server reports: metrics, log lines, traces."""
