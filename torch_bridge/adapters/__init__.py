"""Adapters: low-rank updates of a frozen module, as PEFT has them."""
