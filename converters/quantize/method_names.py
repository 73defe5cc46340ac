"""The names of the calibrated methods, without torch: methods.py makes them."""

GPTQ = ("int8-gptq", "fp8-gptq", "w8a8-int8-gptq", "w8a8-fp8-gptq", "w8a8-fp8-blocks-gptq")
#: value of --quantize -> its method; it rounds to nearest if the method cannot run
DEFAULT_METHODS = {"int8": "int8-gptq"}
#: value of --quantize -> the value that rounds to nearest in the same format
NEAREST = {"int8": "int8-nearest"}
METHODS = (*GPTQ, "int4-gptq", "int4-awq", "int4-awq-gptq", "int4-tuned", "smoothquant", "smoothquant-gptq")
