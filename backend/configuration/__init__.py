"""Settings, read in one place and frozen."""
