"""The model on its device: loading, launching, sampling, memory."""
