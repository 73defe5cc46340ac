"""`tridecode build-repo`: from a checkpoint to a model repository.

commands     the commands `build-repo` and `check`
options      the checks of its arguments, without torch
build        conversion, comparison, repository
staging      the folder that becomes the output
calibration  rounding with statistics of texts
"""
