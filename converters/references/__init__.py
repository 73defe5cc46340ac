"""Reference models: transformers' networks with the tensors of a checkpoint or of a weight directory."""
