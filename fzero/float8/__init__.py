"""Products in 8 bits: which (`recipe`), how they are scaled (`scaling`), where (`products`)."""
