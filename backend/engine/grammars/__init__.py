"""Answers that obey a grammar: compilation, masks of the possible tokens, and the threads of both."""
