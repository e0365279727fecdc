"""What stands in while a module is exported, for what torch.export cannot trace.

- `table`: functions of PyTorch and what stands for each, entered with all others here.
- Layers: `packed_sequences`, `synchronized_norms`, `state_spaces`, `causal_masks`, `adapters`,
  mixtures of experts (`experts`, `older_experts`; `capacity`: what each of them takes),
  `rewritten_rows` (an embedding's `max_norm=`).
- `slopes`: gradients inside a forward, of one op each. `random_numbers`: how a forward draws.
- `rewritten_rows`: embeddings that scale their weight as they are read.
- `replacement`: attributes that are others for a while.
"""
