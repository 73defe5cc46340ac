"""Prompt learning: tables of virtual tokens, and their part in a step."""
