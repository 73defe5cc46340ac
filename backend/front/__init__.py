"""The OpenAI service: HTTP next to Triton, on the engine's own socket. No torch, no Triton here."""
