"""From a graph to a chain: equal blocks, stacks, links, the two halves of a loss."""
