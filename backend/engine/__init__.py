"""What runs in the rank processes: scheduler, loop, engine."""
