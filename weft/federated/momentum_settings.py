"""The setting of policies whose clients follow the server's direction in part."""

from pydantic import Field

from weft.section import Section


class MomentumSettings(Section):
    """Settings of federation policies with momentum: the weight of a client's own gradient against the last
    direction.
    """

    beta: float = Field(
        0.1,
        gt=0,
        le=1,
        description=(
            "Weight of a client's own gradient in its local steps. The direction of the model's last change has the "
            "weight 1 - beta. 1: no momentum."
        ),
    )
