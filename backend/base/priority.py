"""Priorities of requests: smaller is sooner."""

#: the lowest priority, for work that waits for everything else: lines of batches
LOWEST_PRIORITY = 2**31 - 1
