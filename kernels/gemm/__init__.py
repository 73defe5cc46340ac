"""GEMMs on an NVIDIA GPU: weight kinds, choice of kernels, launches."""
