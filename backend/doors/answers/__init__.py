"""Answers of doors: tensors, tokens and their senders."""
