"""The optional features of a step: what each adds to a plan, and what becomes of its results. No torch."""
