"""Nothing that the planner may choose by itself stands in the table of what cannot be combined."""

from dataclasses import replace

import pytest

from weft.layout.layout import Layout
from weft.planner.cost import RECOMPUTE
from weft.planner.engine_constants import ENGINES
from weft.planner.finalists import Final, chunks_of
from weft.planner.layout_search import Pin, search
from weft.planner.machine import Cluster
from weft.planner.planned_recipe import layout_tree
from weft.recipe import Memory, ModelShape, Optimizer, Train
from weft.recipe.conflicts import AskedRecipe, refuse_conflicts
from weft.shapes.shape import shape_of

SHAPES = {
    "few heads": ModelShape(layers=6, embed=96, heads=3, vocab=257),
    "shared keys": ModelShape(
        layers=13, embed=128, heads=8, kv_heads=2, vocab=500, tied=True
    ),
    "linear": ModelShape(
        layers=4, embed=64, heads=4, vocab=257, mixer="retention", softmax_every=2
    ),
    "one layer": ModelShape(layers=1, embed=32, heads=2, vocab=257),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    ("world", "site", "pin"),
    [(1, None, ""), (6, None, ""), (8, None, ""), (16, 8, ""),
     (4, None, "weights=file"), (4, None, "moments=file"), (4, None, "activations=file")],
)  # fmt: skip
def test_no_candidate_stands_in_the_table(
    name: str, world: int, site: int | None, pin: str
) -> None:
    """Every candidate that fits, with the vocabulary at the ends and over the pipeline."""
    model = SHAPES[name]
    between = 0.1 if site else None
    # Of little memory, so that secondary partitions and offloading are among the candidates as well.
    cluster = Cluster(
        device="H100-80GB",
        count=world,
        per_node=4,
        memory=1.0,
        site=site,
        between=between,
    )
    engine = replace(ENGINES["weft"], constant=0.0)
    found = search(
        shape_of(model), cluster, engine, 48, 4096, pins=[Pin.parse(pin)] if pin else ()
    )
    layouts = set()
    for i in found.order:
        plan = found.plan(int(i))
        stages = int(plan.pp) * chunks_of(plan)
        # else there is nothing to cut
        for barriers in (0, 1) if plan.pp > 1 and model.layers >= stages else (0,):
            final = Final(
                found.shape, found.machine, plan, found.cost, (), 0.0, barriers=barriers
            )
            layout = Layout.model_validate(layout_tree(final))
            train = Train(recompute=RECOMPUTE[int(plan.recompute)])  # type: ignore[arg-type]
            memory = Memory(**plan.away)  # type: ignore[arg-type]
            optimizer = Optimizer(post_validation=plan.pp > 1 and not pin)
            asked = AskedRecipe(
                layout=layout,
                shape=model,
                train=train,
                optimizer=optimizer,
                memory=memory,
            )
            refuse_conflicts(asked)
            assert layout.world == world
            layouts.add(layout)
    assert len(layouts) > world // 2
