"""Which sequences run in a step. Host only, without torch."""
