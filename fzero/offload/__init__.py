"""How parked leaves visit the device in a step (`fz.offload` itself: `fzero.state.offload`).

`stream` runs a function of leaves that visit in turn, `slabs` on one slab at a time;
`fzero.sharding.park` moves leaves between tiers.
"""
