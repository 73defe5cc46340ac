"""KV cache blocks and slots: who holds them. Host only, without torch."""
