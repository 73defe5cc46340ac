"""`tridecode adapters`: the folder of LoRA adapters of a model repository."""
