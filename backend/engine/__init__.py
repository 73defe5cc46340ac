"""The rank processes: scheduler, loop, engine."""
