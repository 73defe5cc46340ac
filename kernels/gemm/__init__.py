"""Products on an NVIDIA GPU: the kinds of weights, the choice of kernels, the launches."""
