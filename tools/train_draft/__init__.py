"""`tridecode train-draft`: trains drafters for a model on texts that the model writes."""
