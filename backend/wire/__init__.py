"""Messages and values that are sent between processes, and their limits."""
