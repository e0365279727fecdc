"""Checkpoints of earlier versions: what this version has no place for is named, never guessed."""

from __future__ import annotations

import json

import optax
import pytest
from support import tiny

import fzero as fz


MODEL, TX = tiny.regression(), optax.adam(1e-2)


def test_8_bit_reductions_of_a_checkpoint_are_left_out_with_a_word(tmp_path):
    """`reduce_dtype="int8"` and `state.error` of fzero 0.1."""
    plan = tiny.plan(zero=1, data=2, reduce="step")
    state = fz.init(MODEL, TX, plan)
    number = fz.save(tmp_path, state, plan, asynchronous=False)
    file = tmp_path / str(number) / "meta" / "metadata"
    meta = json.loads(file.read_text())
    del meta["sum"]
    meta["plan"]["reduce_dtype"] = "int8"
    meta["leaves"]["error/w"] = [[2, tiny.D, tiny.WIDTH], "bfloat16"]
    file.write_text(json.dumps(meta))
    assert fz.checkpoint(tmp_path).plan == plan
    with pytest.warns(UserWarning, match="what 8-bit reductions .* had not sent yet"):
        restored = fz.restore(tmp_path, MODEL, TX, plan)
    tiny.same_bits(restored, state)


def test_a_format_of_a_later_version_is_refused(tmp_path):
    plan = tiny.plan(zero=1, data=2)
    number = fz.save(tmp_path, fz.init(MODEL, TX, plan), plan, asynchronous=False)
    file = tmp_path / str(number) / "meta" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    with pytest.raises(fz.CheckpointError, match=r"expected one of the formats \[1, 2\] .*, got 3"):
        fz.restore(tmp_path, MODEL, TX, plan)
