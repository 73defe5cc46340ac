"""The doors' connection to the engine, and their open requests."""
