"""What doors send for a request."""
