"""What layers exchange along the axes that divide them.

- `attention` along `context`: by a `ring`, or by heads; `blocks`: what one device computes of it;
  `cudnn`: cuDNN's kernel.
- `experts`: tokens to their experts and back; `balance`: how evenly; `expert_products`: products
  of rows sorted by expert.
- `rows`: those of all devices, for a loss that looks across them.
"""
