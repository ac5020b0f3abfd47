"""The section `cost` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator
from typing_extensions import Self

from raypipe.config import Section
from raypipe.costs.nodes import NODES


class CostConfig(Section):
    """What the nodes that a job runs on cost."""

    node: str | None = None
    """The node type that the job runs on, for example g5.xlarge or Standard_NC24ads_A100_v4.
    `raypipe cost --nodes list` lists them. null: money is not estimated."""

    price_per_hour: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Your own prices by node type, in dollars an hour: {g5.xlarge: 0.7}. They replace list prices,
    and add node types that raypipe does not know."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.node is not None and self.price(self.node) is None:
            raise ValueError(
                f"node={self.node} has no price here. Give one: price_per_hour={{{self.node}: 1.2}}"
            )
        return self

    def price(self, node: str) -> float | None:
        """Dollars an hour; None for a node type that nobody gave a price."""
        if node in self.price_per_hour:
            return self.price_per_hour[node]
        return NODES[node].usd_per_hour if node in NODES else None
