"""Drafts of a sequence's next tokens: where they come from, and how many a step verifies. No torch."""
