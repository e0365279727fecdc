"""What terms are where all that a layer has is zero: on rows that are no layers."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.optimizer.terms import OWN, Ref, Terms


# Zero where their (first) operand is.
_KEEP = frozenset(
    """
    abs asin asinh atan atanh cbrt ceil convert_element_type copy erf expm1 floor log1p neg
    reduce_max reduce_min reduce_or reduce_sum reshape round sign sin sinh full sqrt square
    tan tanh transpose broadcast_in_dim
    """.split()  # noqa: SIM905
)


class Zeros:
    """Which terms are zero on rows of zeros.

    Gradients and parameters are. A leaf of the optimizer's state is if it starts so, and stays so
    where it and the others are.

    Args:
        terms: all terms.
        state: for each leaf of the state the terms of its first and its next value.
    """

    def __init__(self, terms: Terms, state: Sequence[tuple[int, int]]) -> None:
        self.terms = terms
        self.state = {i for i, (first, _) in enumerate(state) if self._zero(first, {})}
        while True:
            known: dict[int, bool] = {}
            stay = {i for i in self.state if self._zero(state[i][1], known)}
            if stay == self.state:
                break
            self.state = stay
        self.known = known

    def harmless(self, kind: str, term: int) -> bool:
        """Whether rows of zeros change nothing in a reduction over all rows."""
        if kind in ("reduce_sum", "reduce_or"):
            return self._zero(term, self.known)
        return kind == "reduce_and" and self._finite(term)

    def _finite(self, term: int) -> bool:
        key = self.terms.keys[term]
        if key[0] == "is_finite":
            return self._zero(key[-1][0][0], self.known)
        return key[0] in ("reduce_and", "reshape", "full") and self._finite(key[-1][0][0])

    def _zero(self, term: int, known: dict[int, bool]) -> bool:
        if term not in known:
            known[term] = self._is_zero(term, known)
        return known[term]

    def _is_zero(self, term: int, known: dict[int, bool]) -> bool:
        key = self.terms.keys[term]

        def zero(ref: Ref) -> bool:
            if ref[1] not in (None, OWN):  # of all layers, or of another one
                return False
            return self._zero(ref[0], known)

        name = key[0]
        if name == "input":
            return True
        if name == "state":
            return key[2] in self.state
        if name == "literal":
            return bool(key[1] == 0)
        if name == "bag":
            return key[1] != "reduce_and" and all(zero(ref) for ref, _ in key[2])
        if name in ("mul", "dot_general"):
            return any(map(zero, key[-1]))
        if name == "div":
            return zero(key[-1][0]) and not zero(key[-1][1])
        if name == "sub":
            return all(map(zero, key[-1]))
        if name in ("select_n", "cond"):
            return all(map(zero, key[-1][1:]))
        if name == "integer_pow":
            return dict(key[1])["y"] > 0 and zero(key[-1][0])
        return name in _KEEP and zero(key[-1][0])
