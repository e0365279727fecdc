"""Text from a converted decoder: prefill and decode with a static key-value cache.

- `generate` takes `prompts`, runs `programs` and draws by `sampling`.
- `key_value_cache`: buffers of a decoder that hold it; `decoder`: its graphs, one for each size.
"""
