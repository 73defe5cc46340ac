"""The processes of the front: its first one, the workers, their connections and counters."""
