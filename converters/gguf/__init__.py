"""GGUF files: the rules of their architectures, their hyperparameters and their tokenizers."""
