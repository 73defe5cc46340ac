"""`tridecode doctor`: finds faults of a model repository and its machine, and advises what to change."""
