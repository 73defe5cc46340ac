"""Code of the rank processes: scheduler, loop, engine."""
