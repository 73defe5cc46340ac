"""Chat templates of checkpoints, rendered in a child process with limits."""
