"""The load generator: prompts, worker processes, and the summary of their records."""
