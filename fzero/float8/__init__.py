"""Products in 8 bits: which, how they are scaled, and how they are found."""
