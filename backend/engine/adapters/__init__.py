"""LoRA adapters: which are loaded, and their part in a step."""
