"""Accuracy of a served model on public test sets, and of the same model in transformers."""
