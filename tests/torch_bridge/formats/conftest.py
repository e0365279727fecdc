"""Trainings run here, through optax: it leaves promotion to JAX."""

import pytest


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here."""
