"""How parked leaves visit the device in a step (`fz.offload` itself: `fzero.state.offload`)."""
