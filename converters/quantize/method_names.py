"""The names of the calibrated methods, without torch: methods.py makes them."""

GPTQ = ("int8-gptq", "fp8-gptq", "w8a8-int8-gptq", "w8a8-fp8-gptq", "w8a8-fp8-blocks-gptq")
METHODS = (*GPTQ, "int4-gptq", "int4-awq", "int4-awq-gptq", "int4-tuned", "smoothquant", "smoothquant-gptq")
