"""Requests as doors read them: tensors, parameters and limits."""
