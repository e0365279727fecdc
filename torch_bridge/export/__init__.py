"""PyTorch's side: a module traced into a graph, and what export would lose."""
