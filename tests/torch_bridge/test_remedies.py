"""What PyTorch says of a module that it cannot trace comes with what to do."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn

import fzero as fz
import torch_bridge as tb
from fzero.errors import CheckpointError, ConversionError
from torch_bridge.export.stand_ins.checks_of_values import harmless


X = torch.ones(4, 4)


class Applies(nn.Module):
    """A function of its argument, and of a keyword."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, k: Any = None) -> torch.Tensor:
        return self.function(x)


def entered(x: torch.Tensor) -> torch.Tensor:
    torch.autocast("cpu", torch.bfloat16).__enter__()
    return x @ x.t()


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        assert (x < 9).all()
    except AssertionError:
        return x
    return x * 2


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda x: x * x.detach().numpy().mean(), "torch.library.custom_op"),
        (entered, r"Say `with torch\.autocast"),
        (lambda x: x * torch.tensor([x[0, 0], x[1, 1], x[0, 1], x[0, 0]]), r"torch\.stack"),
        (lambda x: torch.sparse.mm(x.to_sparse(), x), "index_add and gather"),
        (lambda x: torch.nested.nested_tensor([x, x[:2]]).to_padded_tensor(0.0), "pad_sequence"),
        (caught, r"torch\._assert_async"),
    ],
    ids=["numpy", "autocast", "tensors", "sparse", "nested", "assert"],
)
def test_what_torch_says_of_a_trace_comes_with_a_remedy(function: Any, remedy: str) -> None:
    with pytest.raises(ConversionError, match=remedy):
        tb.convert(Applies(function), X)


@pytest.mark.parametrize(
    "function", [lambda x: x * {4: 1.0}.get(x.shape[0], 2.0), lambda x: x * x.nbytes]
)
def test_a_size_that_is_no_number_while_it_is_free_is_fixed(function: Any) -> None:
    """Another size is another graph."""
    module = Applies(function)
    converted = tb.convert(module, X)
    for rows in (X, torch.ones(5, 4)):
        np.testing.assert_array_equal(converted(rows), module(rows))


def test_a_line_is_named_whatever_a_module_calls_itself() -> None:
    class Asserts(nn.Module):
        def forward(this, x: torch.Tensor) -> torch.Tensor:
            assert x.shape[0] == 77
            return x

    with pytest.raises(ConversionError, match=r"in \(root\) at: .*assert x\.shape\[0\] == 77"):
        tb.convert(Asserts(), X)


def test_what_is_asserted_of_values_is_left_out() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x < 9).all())
        torch._check((x < 9).all().item())
        return x * 2

    found = tb.convert(Applies(checked), X)(10 * X)  # which PyTorch refuses
    np.testing.assert_array_equal(found, 20 * X)
    with pytest.raises(RuntimeError):
        checked(10 * X)


def test_an_if_that_only_raises_is_left_out_with_a_word() -> None:
    def checked(x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if labels is not None and labels.max() >= 4:
            raise ValueError("no such label")
        if not (x < 9).all():
            raise ValueError("too large")
        assert x.isfinite().all(), "not finite"
        return x * 2

    with pytest.warns(
        tb.LeftOutCheckWarning, match=r"checked raises where .*`if not \(x < 9\)\.all\(\):`"
    ):
        found = tb.convert(Applies(checked), X)
    np.testing.assert_array_equal(found(10 * X), 20 * X)  # which PyTorch refuses


def test_a_check_that_a_caller_may_catch_is_a_branch() -> None:
    def checked(x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 9:
            raise ValueError("too large")
        return x * 2

    def caught(x: torch.Tensor) -> torch.Tensor:
        try:
            return checked(x)
        except ValueError:
            return x * 0

    with pytest.raises(ConversionError, match="branches must not depend on tensor values"):
        tb.convert(Applies(caught), X)


class Recursive(nn.Module):
    """A class that is its own part: what it asks, its own kind may catch."""

    def __init__(self, child: nn.Module | None = None) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.child is None:
            if x.sum() < 0:
                raise ValueError("negative")
            return x * 2
        try:
            return self.child(x)
        except ValueError:
            return x


def on_one_line(x: torch.Tensor) -> torch.Tensor:
    assert x.isfinite().all(); n = 3 if x.sum() > 0 else 5  # fmt: skip # noqa: E702
    return x * n


def of_a_list(x: torch.Tensor) -> torch.Tensor:
    assert len([t for t in (x, x) if t.isnan().any()]) == 0
    return x


def of_a_number(x: torch.Tensor) -> torch.Tensor:
    assert bool(x.isnan().any()) == 0
    return x


def of_a_choice(x: torch.Tensor) -> torch.Tensor:
    assert (x.max() if x.sum() > 0 else x.min()) < 9
    return x


def kept_by_name(x: torch.Tensor) -> torch.Tensor:
    assert (large := bool(x.sum() > 9)) or x.isfinite().all()  # noqa: RUF018
    return x * 2 if large else x


def suppressed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(ValueError):
        if x.sum() < 0:
            raise ValueError("negative")
        x = x * 2
    return x


def swallowed(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * 2 if x.sum() > 0 else x * 3
    return x


def returned_at_last(x: torch.Tensor) -> torch.Tensor:
    try:
        if x.sum() > 0:
            x = x * 2
    finally:
        return x  # noqa: B012


def as_a_number(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * float(x.sum())
    return x


def by_numpy(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * float(x.sum().numpy())
    return x


def of_an_item(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * 2 if x.sum().item() > 0 else x * 3
    return x


def as_an_array(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * np.asarray(x.sum().detach()).item()
    return x


def as_a_text(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * len(f"{x.sum():.3f}")
    return x


def by_places(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * len((x > x.sum()).nonzero())
    return x


def by_counting(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        x = x * sum(range((x > x.sum()).nonzero().shape[0]))
    return x


SWALLOW = [
    swallowed, returned_at_last, as_a_number, by_numpy, of_an_item, as_an_array, as_a_text,
    by_places, by_counting,
]  # fmt: skip
ASKS = [on_one_line, of_a_list, of_a_number, of_a_choice, kept_by_name, suppressed]


@pytest.mark.parametrize("asks", [*map(Applies, ASKS), Recursive(Recursive())], ids=str)
def test_what_else_asks_a_tensor_is_a_branch(asks: nn.Module) -> None:
    with pytest.raises(ConversionError, match="branches must not depend on tensor values"):
        tb.convert(asks, X)


@pytest.mark.parametrize("asks", SWALLOW)
def test_a_branch_whose_refusal_the_forward_swallows_is_refused(asks: Any) -> None:
    with pytest.raises(ConversionError, match=rf"depends on values: .*{asks.__name__} \(`.*x\.sum"):
        tb.convert(Applies(asks), X)


def inverted(x: torch.Tensor) -> torch.Tensor:
    try:
        return torch.linalg.inv(x)
    except torch.linalg.LinAlgError:
        return torch.linalg.pinv(x)


def factored(x: torch.Tensor) -> torch.Tensor:
    def of(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x)

    try:
        return of(x)
    except Exception:
        return of(x + 2 * torch.eye(2))


def looked_up(x: torch.Tensor) -> torch.Tensor:
    try:
        return nn.functional.embedding(x.long(), x)
    except (IndexError, KeyError):
        return x


@pytest.mark.parametrize("tries", [inverted, factored, looked_up])
def test_what_raises_of_values_alone_is_refused_in_a_try(tries: Any) -> None:
    with pytest.raises(ConversionError, match=rf"depends on values: .*{tries.__name__} \(`return"):
        tb.convert(Applies(tries), torch.eye(2))


def test_a_try_for_other_errors_is_none() -> None:
    def inverse(x: torch.Tensor) -> torch.Tensor:
        try:
            return torch.linalg.inv(x)
        except ImportError:
            return x
        finally:
            x = x + 1

    x = 2 * torch.eye(2)
    np.testing.assert_array_equal(tb.convert(Applies(inverse), x)(x.numpy()), np.eye(2) / 2)


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        ("if x.any(): raise E", {"x.any()": False}),
        ("if not x: raise E", {"x": True}),
        ("if n is not None and x > n: raise E", {"n is not None": False, "x > n": False}),
        ("if x or not y: raise E", {"x": False, "y": True}),
        ("assert x.all() and not y, 'no'", {"x.all()": True, "y": False}),
        ("assert x.all(); n = 1 if x.any() else 2", {"x.all()": True}),
        ("with torch.no_grad(): assert x", {"x": True}),
        ("with suppress(E): assert x", {}),
        ("try:  assert x\nexcept E: pass", {}),
        ("try:  assert x\nfinally: pass", {}),
        ("if x: raise E\nelse: n = 1", {}),
        ("if x: n = 1", {}),
        ("if x: n = 1; raise E", {}),
        ("if x: raise StopIteration", {}),
        ("n = 1 if x else 2", {}),
        ("while x: raise E", {}),
        ("n = bool(x)", {}),
        ("if x", {}),
    ],
)
def test_only_what_does_nothing_but_raise_is_left_out(
    source: str, answers: dict[str, bool]
) -> None:
    found = {source[a:b]: truth for (_, _, a, b), truth in harmless(source).items()}
    whole = {found.pop(key) for key in list(found) if key.startswith(("if ", "assert "))}
    assert found == answers
    assert whole == (set(answers.values()) if len({*answers.values()}) == 1 else set())


def test_arguments_of_other_kinds_are_told_what_to_be() -> None:
    with pytest.raises(ConversionError, match=r"numpy\.float32.*float\(x\) for a number of NumPy"):
        tb.convert(Applies(torch.tanh), X, k=np.float32(2))


def test_a_module_without_values_is_not_trained() -> None:
    with torch.device("meta"):
        module = nn.Linear(4, 2)
    with pytest.raises(ConversionError, match=r"no values \(`meta`\).*tb\.restore"):
        tb.fit(module, [(X, X[:, :2])], nn.MSELoss(), optimizer=optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"<`bias`: on the `meta` device, without a value>"):
        jax.jit(lambda p: p)(tb.convert(module, X.to("meta")).params)


def test_a_module_of_inference_mode_is_not_written_into() -> None:
    with torch.inference_mode():
        module = nn.Linear(4, 2)
    converted = tb.convert(nn.Linear(4, 2), X)
    state = fz.init(converted.model(lambda f, b: f(b).mean()), None, fz.Plan(data=1))
    with pytest.raises(CheckpointError, match=r"`weight` was made under torch\.inference_mode"):
        tb.load_into(module, state)


def test_what_is_no_state_is_named() -> None:
    converted = tb.convert(nn.Linear(4, 2), X)
    for given in ((converted.params, {}), None):
        with pytest.raises(
            CheckpointError, match=f"a state or its params, got a {type(given).__name__}"
        ):
            tb.state_dict(converted, given)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"batch_dim": 2}, r"batch_dim=2\): expected a dim .* have 2 at most"),
        ({"batch_dim": "0"}, r"batch_dim='0'\): expected a dim"),
        ({"batch_dim": -1}, r"batch_dim=-1\): expected a dim"),
        ({"masters": "no"}, r"masters='no'\): expected True or False"),
        ({"train": None}, r"train=None\): expected True or False"),
    ],
)
def test_an_option_that_would_say_nothing_is_refused(option: Any, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        tb.convert(nn.Linear(3, 2), torch.ones(2, 3), **option)
