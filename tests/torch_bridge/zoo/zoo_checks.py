"""The properties that every model of the zoo has; each test file applies them to its table."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.utils._pytree as pytree
from parity import leaves_of, numpy_of, relative_error
from zoo_entries import LEARNING_RATE, TEST_BATCH, Entry, Result, evaluate, livelier

import fzero as fz
import torch_bridge as tb


# A gradient that is zero in exact arithmetic (of a key's bias before softmax, of a bias before a
# normalisation) is rounding only: judged against the largest gradient of the model.
NEGLIGIBLE = 3e-3


def check_forward(result: Result, entry: Entry) -> None:
    for got, want in (result.evaluated, result.trained):
        assert got
        for g, w in zip(got, want, strict=True):
            assert g.dtype == _narrow(w.dtype)
            assert relative_error(*_real(g, w)) <= entry.forward


def check_gradients(result: Result, entry: Entry) -> None:
    got, want = result.gradients
    assert set(got) == set(result.converted.by_name(result.converted.params)) <= set(want)
    largest = max(float(np.abs(w).max()) for w in want.values() if w.size)
    assert largest > 0.0
    for name, gradient in got.items():
        difference = float(np.abs(gradient - want[name]).max()) if gradient.size else 0.0
        scale = max(float(np.abs(want[name]).max()) if gradient.size else 0.0, NEGLIGIBLE * largest)
        assert difference <= entry.gradient * scale, f"{name}: {difference / scale:.2e}"


def check_buffers(result: Result, entry: Entry) -> None:
    got, want = result.buffers
    for name, value in got.items():
        assert relative_error(*_real(value, want[name])) <= entry.forward, name


def check_round_trip(result: Result) -> None:
    converted = result.converted
    params, buffers = tb.load_state_dict(converted, result.before)
    for given, own in ((params, converted.params), (buffers, converted.buffers)):
        for name, value in given.items():
            assert value.dtype == own[name].dtype
            np.testing.assert_array_equal(value, own[name])
    back = tb.state_dict(converted, converted.params)
    assert list(back) == list(result.before)
    for name, tensor in result.before.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor), name


def check_step(result: Result, entry: Entry) -> None:
    got, want = result.stepped
    assert list(got) == list(want)
    changed = 0
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        changed += not torch.equal(tensor, result.before[name])
        assert relative_error(*_real(got[name].numpy(), tensor.numpy())) <= entry.forward, name
    assert changed


def check_batch(result: Result, entry: Entry) -> None:
    """All comparisons ran at another batch size; dims that are tied to the example are listed."""
    fixed = [dim for dim in result.converted.fixed_dims() if dim.endswith(" dim 0")]
    assert fixed == [f"`{name}` dim 0" for name in entry.fixed]


def check_row(entry: Entry) -> None:
    """The same conversion serves one row, in both modes."""
    result = evaluate(entry, batch=1)
    for check in (check_forward, check_gradients, check_buffers, check_step):
        check(result, entry)


def _narrow(dtype: Any) -> Any:
    return {np.dtype(np.int64): np.dtype(np.int32)}.get(np.dtype(dtype), np.dtype(dtype))


def _real(got: Any, want: Any) -> tuple[Any, Any]:
    """Complex arrays as pairs of real ones."""
    if np.iscomplexobj(want):
        return tuple(np.stack([x.real, x.imag]) for x in (got, want))  # type: ignore[return-value]
    return got, want


def check_divided(result: Result, entry: Entry) -> None:
    """Loss, gradients and one update, with every layer shared out over two devices.

    What is divided, and why what is not is not, is said of every parameter.
    """
    parallel = result.converted.parallel
    said = {one.name: one.why for one in (*parallel.divided, *parallel.whole)}
    assert said.keys() == result.converted.params.keys()
    assert all(said.values())
    off = deviations(result.converted, entry)
    assert all(one <= 2e-5 for one in off.values()), off  # (NaN is not)


def deviations(converted: tb.Converted, entry: Entry) -> dict[str, float]:
    """How far a step on two devices is off that on one, of the largest value of each parameter."""
    call = entry.call(TEST_BATCH)
    args, kwargs = numpy_of(call.args), numpy_of(dict(call.kwargs))

    def loss(out: Any, batch: Any) -> Any:
        floats = [leaf for leaf in leaves_of(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        # Not linear, so that every gradient depends on every value; and as well conditioned for
        # large ones. (`tanh(leaf) ** 2` is not: CLIP's logits reach -9, where float32 has no digits
        # of 1 - tanh² left. Of its logit scale's gradient, 25 draws beside float64: rms 1.3e-5 off
        # in torch, 4.6e-5 divided; by this loss 7e-8 and 8e-8.)
        return sum(jnp.mean(jnp.log1p(leaf**2)) for leaf in floats)

    model = converted.model(loss, inputs=lambda batch: (batch["args"], batch["kwargs"]))
    tx, found = optax.sgd(LEARNING_RATE, momentum=0.9), []
    for plan in (fz.Plan(zero=0, data=1, tensor=2), fz.Plan(zero=0, data=1)):
        devices = jax.devices()[: plan.tensor]
        state = fz.init(model, tx, plan, rng=0, devices=devices)
        step = fz.train_step(model, tx, plan, devices=devices)
        state, metrics = step(state, {"args": args, "kwargs": kwargs})
        # After one step the momentum is the gradient.
        trees = jax.device_get((state.params, state.opt_state[0].trace))
        found.append((metrics, [converted.by_name(tree) for tree in trees]))
    (divided, own), (alone, wanted) = found
    off = {
        name: abs(float(divided[name]) / float(alone[name]) - 1) for name in ("loss", "grad_norm")
    }
    largest = max(_size(value) for value in wanted[1].values() if value is not None)
    vanishing = _vanishing(entry)

    def scale(kind: str, leaf: str, size: float) -> float:
        if kind == "update":
            return max(size, 1e-3)
        # What rounding leaves of a sum of large terms is a few bits of them, as many on one device.
        # (The biases before Segformer's batch norm, 25 draws beside float64, of NEGLIGIBLE: rms
        # 1.5e-5 off in torch, 1.6e-5 on one device and divided: the two can be 2e-5 apart.)
        return max(size, (1e-2 if leaf in vanishing else NEGLIGIBLE) * largest)

    for name, ours, theirs in zip(("update", "gradients"), own, wanted, strict=True):
        each = [
            _size(ours[leaf] - value) / scale(name, leaf, _size(value))
            for leaf, value in theirs.items()
            if value is not None  # of a frozen parameter
        ]
        off[name] = float(np.max(each, initial=0.0))  # (Python's own loses a NaN)
    return off


def _vanishing(entry: Entry) -> set[str]:
    """Parameters whose gradient is zero in exact arithmetic: as good as zero in float64.

    None of a model with an operator that PyTorch has not got in float64 (grouped products).
    """
    torch.manual_seed(3)
    module, call = livelier(entry.make()).double().train(), entry.call(TEST_BATCH)

    def double(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
        return leaf.detach().double() if is_float else leaf

    args, kwargs = pytree.tree_map(double, (call.args, dict(call.kwargs)))
    try:
        with torch.random.fork_rng():
            out = leaves_of(module(*args, **kwargs))
    except RuntimeError as error:
        if "got Double" not in str(error):
            raise
        return set()
    sum((leaf.double() ** 2).log1p().mean() for leaf in out if leaf.requires_grad).backward()
    sizes = {
        name: float(value.grad.abs().max())
        for name, value in module.named_parameters()
        if value.grad is not None and value.numel()
    }
    # float64 has 2e-16: sums of thousands of terms are zero to this.
    return {name for name, size in sizes.items() if size < 1e-12 * max(sizes.values())}


def _size(value: np.ndarray) -> float:
    return float(np.max(np.abs(value), initial=0.0))
