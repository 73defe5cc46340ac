"""Drafters that propose tokens on the device of each rank."""
