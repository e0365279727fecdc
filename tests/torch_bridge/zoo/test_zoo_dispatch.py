"""In which dtypes a float32 module computes under a plan of 16 bits: PyTorch's own, op by op."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
import torch
from test_zoo_dtypes import EACH, ENTRIES, _cast
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from zoo_entries import Entry

import torch_bridge as tb
from torch_bridge.dtypes import jax_dtype
from torch_bridge.structure import retrace
from torch_bridge.structure.retrace import Computed


# What multiplies matrices, normalises, and takes exponentials, by parts of its operators' names.
KINDS = {
    "multiply": ("mm.", "bmm.", "addmm.", "baddbmm.", "mv.", "dot.", "convolution.", "attention"),
    "normalise": ("native_layer_norm", "batch_norm", "group_norm", "rms_norm", "rsqrt."),
    "softmax": ("softmax.", "exp.", "logsumexp."),
}
# One operator here (`test_state_spaces.py`) for a loop of steps that each multiply.
SCANNED = ("mamba",)


class Seen(TorchDispatchMode):
    """Counts what PyTorch runs, by kind and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        for kind, parts in KINDS.items():
            if any(name.startswith(p) or (p[-1] != "." and p in name) for p in parts):
                self.found[kind, str(tensors[0].dtype)] += 1
        return func(*args, **(kwargs or {}))


def _seen(module: Any, args: Any, kwargs: Any) -> Counter[tuple[str, str]]:
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # one operator for a whole layer
    try:
        with torch.no_grad(), Seen() as seen:
            module(*args, **kwargs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return seen.found


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "dtype"), [pytest.param(*p.values, id=p.id) for p in EACH])
def test_dtypes_are_those_that_torch_dispatches(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that a plan runs has PyTorch's dtypes, and JAX those of the program."""
    entry: Entry = ENTRIES[name]
    torch.manual_seed(3)
    exact = entry.make().eval()
    example, call = entry.call(2), entry.call(3)
    converted = tb.convert(exact, *example.args, train=False, roll=False, **example.kwargs)
    args = [_cast(a, dtype) for a in call.args]
    kwargs = {k: _cast(a, dtype) for k, a in call.kwargs.items()}
    programs: list[Any] = []
    traced = retrace.export_program
    monkeypatch.setattr(
        retrace, "export_program", lambda *a: programs.append(traced(*a)) or programs[-1]
    )
    narrow = Computed(np.dtype(jax_dtype(dtype)))
    converted._graphs.call(False, args, kwargs, narrow)
    (*_, program) = programs

    low = copy.deepcopy(exact).to(dtype)
    run = program.module()
    own = dict(itertools.chain(low.named_parameters(), low.named_buffers()))
    with torch.no_grad():
        for key, tensor in itertools.chain(run.named_parameters(), run.named_buffers()):
            tensor.copy_(own[key])
    got, want = _seen(run, args, kwargs), _seen(low, args, kwargs)
    if name in SCANNED:
        assert set(got) == set(want)
    else:
        assert got == want, (got - want, want - got)

    values: dict[str, Any] = {}

    found = converted._graphs.call(False, *jax.tree.map(_array, (args, kwargs)), narrow)

    def computed(params: Any) -> None:
        given = converted._bind_leaves(found.mode, params, converted.buffers) | found.inputs
        found.mode.graph.run(given, None, values.__setitem__)

    params = {k: np.asarray(v).astype(narrow.dtype) for k, v in converted.params.items()}
    jax.eval_shape(computed, params)
    for node in program.graph.nodes:
        want, got = node.meta.get("val"), values.get(node.name)
        for w, g in zip(pytree.tree_leaves(want), pytree.tree_leaves(got), strict=False):
            if isinstance(w, torch.Tensor) and w.is_floating_point() and isinstance(g, jax.Array):
                assert g.dtype == jax_dtype(w.dtype), (node.name, node.target)


def _array(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.float().numpy().astype(jax_dtype(x.dtype)) if x.is_floating_point() else x.numpy()
