"""The optional features of a step: what each adds to a plan, and how its results are used. No torch."""
