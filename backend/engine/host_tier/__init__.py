"""The host tier of the prefix cache: blocks in memory that outlives the engine."""
