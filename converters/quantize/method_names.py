"""The names of the calibrated methods, without torch: methods.py makes them."""

GPTQ = ("int8-gptq", "fp8-gptq", "w8a8-int8-gptq", "w8a8-fp8-gptq", "w8a8-fp8-blocks-gptq")
#: values of --quantize that choose a method, and round to nearest where it cannot run
DEFAULT_METHODS = {"int8": "int8-gptq"}
#: the value of --quantize that rounds to the same format without texts
NEAREST = {"int8": "int8-nearest"}
METHODS = (*GPTQ, "int4-gptq", "int4-awq", "int4-awq-gptq", "int4-tuned", "smoothquant", "smoothquant-gptq")
