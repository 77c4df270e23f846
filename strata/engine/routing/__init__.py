"""Where a request goes: to one of several replicas of an engine, or to one of its ranks."""
