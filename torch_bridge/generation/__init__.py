"""Text from a converted decoder: prefill and decode with a static key-value cache.

- `generate` takes `prompts`, runs `programs` and draws by `sampling`.
- `cached`: the decoder with its cache; `traced`: its graphs, one for each size.
"""
