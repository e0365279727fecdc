"""The devices over which one leaf is sharded and reduced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """The devices that collectives run over.

    Args:
        data: size of the data axis.
        replica: size of the replica axis.
        ordered: add contributions in device order with our own sums. Within a process the CPU
            backend already adds in that order; gloo's rings do not, and where there are several
            processes jax takes gloo among the devices of one, too: results would depend on how
            devices are spread over processes.
        bits: gather 16-bit floats as integers. The CPU backend widens 16-bit float collectives to
            float32 and then drops the casts around them, which moves twice the bytes and lets
            unrounded values through.
        secondary: neighbours on the data axis that keep a copy of a layer between its passes; 0
            where there is none.
    """

    data: int
    replica: int
    ordered: bool = False
    bits: bool = False
    secondary: int = 0
