"""Text from a converted decoder: prefill and decode with a static key-value cache."""
