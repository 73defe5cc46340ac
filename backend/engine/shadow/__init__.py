"""Shadow runs: ended sequences scored again by a reference."""
