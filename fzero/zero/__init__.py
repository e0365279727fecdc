"""ZeRO inside a step: gathers, passes over layers, reduce-scatters (splits: `fzero.sharding`)."""
