"""What doors read from a request."""
