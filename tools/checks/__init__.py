"""`tridecode check`: faults of a model repository, found by reading its files."""
