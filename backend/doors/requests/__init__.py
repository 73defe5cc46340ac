"""Parsing and checking of requests: tensors, parameters and limits."""
