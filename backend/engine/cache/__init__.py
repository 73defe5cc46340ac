"""KV cache blocks and batch slots, and their owners. Host only, without torch."""
