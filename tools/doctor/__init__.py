"""`tridecode doctor`: what is wrong with a model repository or its machine, and what to change."""
