"""Problem sources with verifiable answers."""
