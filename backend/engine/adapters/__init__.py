"""LoRA adapters: loading, eviction, and their operations in a step."""
