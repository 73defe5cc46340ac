"""The OpenAI service: HTTP beside Triton, on the engine's own socket. No torch, no Triton here."""
