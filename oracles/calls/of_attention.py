"""A call that computes the attention of a ``Problem`` in another form."""

from __future__ import annotations

from collections.abc import Mapping

from fa_verify.oracles.call import Call
from fa_verify.oracles.problem import Problem

__all__ = ["OfAttention"]


class OfAttention(Call):
    """A call with a field ``attention``, which determines the values of its inputs."""

    attention: Problem

    @property
    def dtype(self) -> str:
        """The dtype of the attention."""
        return self.attention.dtype

    @property
    def device(self) -> str:
        """The device of the attention."""
        return self.attention.device

    @property
    def seed(self) -> int:
        """The seed of the attention."""
        return self.attention.seed

    @property
    def family(self) -> str:
        """The family of q, k and v."""
        return self.attention.family

    @property
    def config(self) -> str:
        """The tile configuration of the attention."""
        return self.attention.config

    @property
    def elements(self) -> Mapping[str, int]:
        """The number of elements of each output of the attention."""
        return self.attention.elements

    @property
    def pairs(self) -> int:
        """Pairs of a query row and a key, over batch entries and heads."""
        return self.attention.pairs

    @property
    def longest(self) -> int:
        """The larger of M and N."""
        return self.attention.longest

    @property
    def columns(self) -> int:
        """The larger of D and Dv."""
        return self.attention.columns
