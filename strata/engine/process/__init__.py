"""The engine as a process of its own: its messages, its clients, what it owes them."""
