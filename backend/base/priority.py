"""Priorities of requests: smaller is sooner."""

#: of work that waits for everything else: the lines of batches
LOWEST_PRIORITY = 2**31 - 1
