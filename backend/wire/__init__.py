"""Values that cross processes, and their limits."""
