"""Answers of a door: output tensors, token answers, and the threads that send them."""
