"""Tokenizers of checkpoints, written as files that the tokenizers library reads."""
