"""A state goes to PyTorch from the device: what is parked, or given away, is refused by name."""

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from support import tiny

import fzero as fz
import torch_bridge as tb


def made(tx=None, **options):
    converted = tb.convert(torch.nn.Linear(4, 2), torch.zeros(8, 4))
    model = converted.model(lambda out, batch: jnp.mean((out - batch["y"]) ** 2))
    return converted, fz.init(model, tx or optax.sgd(0.1), fz.Plan(data=1, **options))


@pytest.mark.parametrize("to", ["host", "disk"])
def test_parked_leaves_are_refused(to, tmp_path):
    converted, state = made()
    before = {name: value.clone() for name, value in tb.state_dict(converted, state).items()}
    state = fz.offload(state, "params", to=to, path=str(tmp_path / "offload"))
    for use in (
        lambda: tb.state_dict(converted, state),
        lambda: tb.save(tmp_path / "model.safetensors", converted, state),
    ):
        with pytest.raises(fz.PlacementError, match=rf"params/weight \({to}, 32 bytes\).*reload"):
            use()
    assert not (tmp_path / "model.safetensors").exists()
    after = tb.state_dict(converted, fz.reload(state))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_consumed_state_is_refused(tmp_path):
    converted, state = made()
    fz.offload(state, "params")
    with pytest.raises(fz.StateConsumedError, match=r"state_dict: .* consumed by offload"):
        tb.state_dict(converted, state)
    with pytest.raises(fz.StateConsumedError, match=r"save: .* consumed by offload"):
        tb.save(tmp_path / "model.safetensors", converted, state)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tiers", [{}, {"opt_state": "host"}, {"opt_state": "disk"}], ids=str)
def test_what_is_given_stays(tiers, tmp_path):
    """The state is no other afterwards, wherever the optimizer's is."""
    converted, state = made(optax.adam(0.1), tiers=tiers, disk_path=str(tmp_path))
    leaves = jax.tree.leaves(state)
    before = tiny.host(fz.reload(state, donate=False))
    tb.state_dict(converted, state)
    tb.save(tmp_path / "model.safetensors", converted, state)
    assert all(a is b for a, b in zip(jax.tree.leaves(state), leaves, strict=True))
    after = tiny.host(fz.reload(state, donate=False))
    assert all(before[path].tobytes() == after[path].tobytes() for path in before)
