"""The OpenAI front before a fake engine, measured by a client in C."""
