"""Helpers that every part of the backend uses; they import nothing else of the project."""
