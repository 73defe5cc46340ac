"""Settings of models, engines and doors: each is read in one place and then immutable."""
