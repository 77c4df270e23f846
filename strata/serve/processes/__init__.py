"""The processes of a server: how they start, watch each other and end."""
