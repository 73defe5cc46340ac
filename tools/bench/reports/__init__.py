"""Tables for a terminal, JSON files and plots."""
