"""Quantisation of weights: rounding to nearest, and methods that use statistics of calibration texts.

docs/guides/calibration.md says when to use which. A method is a function over torch tensors; `calibrate`
applies one to a checkpoint, layer by layer.
"""
