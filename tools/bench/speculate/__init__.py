"""`tridecode bench speculate`: what drafts cost and what they save."""
