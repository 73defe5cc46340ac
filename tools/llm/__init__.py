"""The Python interface: `LLM`, its parameters and its results. vLLM's names where they mean the same."""
