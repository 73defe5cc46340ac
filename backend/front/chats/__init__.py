"""Chats of the OpenAI service: prompts by the chat template, and tool calls in answers."""
