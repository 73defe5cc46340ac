"""Tables of docs/reference that are written from the code which they describe."""
