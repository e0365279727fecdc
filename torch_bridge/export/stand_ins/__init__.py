"""What stands in while a module is exported, for what torch.export cannot trace.

- `table`: functions of PyTorch and what stands for each, entered with all others here.
- Layers: `packed_sequences`, `synchronized_norms`, `state_spaces`, `causal_masks`, `adapters`,
  mixtures of experts (`experts`, `older_experts`; `capacity`: what each of them takes).
- `slopes`: gradients inside a forward, of one op each. `random_numbers`: how a forward draws.
- `assigned`: buffers that a forward assigns anew. `distributions`: those of torch, unchecked;
  `checks_of_values`: what a forward raises about values.
- `gradient_modes`: regions without gradients; `gradients_asked`: what asks whether there are any.
- `literals`: numbers of Python on the `meta` device.
- `numbers_as_places`: writes to places that a tensor of one number says.
- `strides`: what a forward reads and writes by strides over memory.
- `arrays`: tensors that share the memory of what a forward writes to.
- `embedding_norms`: embeddings that scale their weight as they are read (`max_norm=`).
- `known_masks`: masks that follow from sizes, as indices.
- `replacement`: attributes that are others for a while.
"""
