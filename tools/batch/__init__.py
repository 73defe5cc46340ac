"""Batch files in OpenAI's format: requests from one file of JSON lines, answers into another."""
