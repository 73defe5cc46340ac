"""Models for the tests of `LLM`: a tiny checkpoint, and what transformers says about it."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints import save, tiny_llama

PROMPTS = ["The history of", "Il pleut sur", "def add(a, b", "今日は"]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def tiny_checkpoint(folder: Path) -> Path:
    """A LLaMA with a chat template."""
    checkpoint = save(tiny_llama(max_position_embeddings=512), folder / "tiny")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return checkpoint
