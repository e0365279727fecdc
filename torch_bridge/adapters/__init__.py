"""Adapters: low-rank updates of a frozen module, as PEFT has them.

- `lora` makes a model with them, of such a `layer`; `quantize` one whose frozen weights have few
  bits.
- `state`: taken out of a state, put in, merged.
"""
