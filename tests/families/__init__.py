"""A module here has CASES, its entries of tests.checkpoints.FAMILIES, by transformers' model type."""
