"""Text and token-id requests to an engine, for every front end: no Triton and no HTTP here."""
