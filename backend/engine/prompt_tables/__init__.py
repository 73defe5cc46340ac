"""Prompt learning: tables of virtual tokens, and their operations in a step."""
