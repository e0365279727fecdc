"""What a step will need and how long it may take, from its compiled program; no GPU needed."""
