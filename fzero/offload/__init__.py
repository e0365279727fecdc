"""Where leaves of a state live, and how they move between device, host and disk."""
