"""What a step does with an optax transformation: what it gives it, and what it asks of it."""
