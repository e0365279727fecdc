"""How parked leaves visit the device in a step (`fz.offload` itself: `fzero.state.offload`).

`park` moves leaves between tiers, `stream` runs a function of leaves that visit in turn, `slabwise`
on one slab at a time.
"""
