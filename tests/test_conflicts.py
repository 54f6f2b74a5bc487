"""The table of what cannot be combined: every entry is refused by all that could run it, and nothing else is."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import Command
from weft.layout.layout import Layout
from weft.layout.mesh import Mesh
from weft.parallel.build import check_fits
from weft.prove.equality import on_one_device
from weft.prove.types import check_types
from weft.recipe import ModelShape, load_recipe
from weft.recipe.conflicts import every_rule
from weft.refusal import Conflict
from weft.registry import Registered, declared
from weft.train.build_step import build_step
from weft.train.setup import build_for_training
from weft.train.step import StepContext

ROOT = Path(__file__).parents[1]

PLUGGED, PAIRS = (
    "plugins=['tests.my_plugins']",
    "data={kind='preference',path='pairs.jsonl'}",
)

#: A model of images, in place of one of texts.
PICTURES = "model.kind=diffusion data={kind='images',path='sklearn:digits'}"

#: Settings of a run that learns from rewards.
REWARDED = 'tasks=[{reward="addition"}] rl.group=4'

#: Setting of a critic with layers of its own.
CRITIC = "roles.critic.trunk=own"

#: Setting of a run that imitates another one.
TAUGHT = "loss.teachers=['runs/teacher']"

#: A rule of layouts in which ranks generate.
GENERATION = "overlap with a chosen sum"

#: A smallest layout that meets each entry, and the settings that it takes; the model has 2 layers and 4 heads.
ROWS = (
    "memory.weights=host memory.embedding=rows model.tied=false optimizer.kind=sgd "
    "optimizer.weight_decay=0"
)
TILES = "memory.weights=host memory.tiles=2"
SMALLEST: dict[str, tuple[str, str]] = {
    "rows of a table that stays": ("", f"{ROWS} memory.weights=device"),
    "rows alone with updates of the whole": ("", f"{ROWS} optimizer.kind=adafactor"),
    "rows of a table that is also the output layer": ("", f"{ROWS} model.tied=true"),
    "rows of a table that other code reads whole": ("", f"{ROWS} train.compile=true"),
    "tiles of weights that stay": ("", "memory.tiles=2"),
    "tiles with updates of whole matrices": ("", f"{TILES} optimizer.kind=muon"),
    "tiles with updates of another order": ("", f"{TILES} memory.alternate=0.5"),
    "tiles of weights that other code reads whole": ("", f"{TILES} train.compile=true"),
    "tiles with selective recompute": ("", f"{TILES} train.recompute=selective"),
    "tiles with passes of other parts": ("shard=4,zero=3,secondary=2", TILES),
    "teachers with a model that is cut": ("tp=2", TAUGHT),
    "teachers with another loss": ("", f"{TAUGHT} loss.kind=dpo {PAIRS}"),
    "teachers with rewards": ("", f"{TAUGHT} {REWARDED}"),
    "secondary without ZeRO-3": ("shard=4,zero=2,secondary=2", ""),
    "secondary that does not divide": ("shard=3,secondary=2", ""),
    "experts that do not fold": ("ep=2", ""),
    "shares of other ranks": ("tp=2,tp_shares=2:1:1", ""),
    "speeds of other stages": ("pp=2", "layout.stage_speeds=[1,2,3]"),
    "tp settings without tp": ("tp_shares=auto", ""),
    "sum in training": ("tp=2,sum=auto", ""),
    "moments nearer than the weights": ("", "memory.weights=host memory.moments=device"),
    "gradients away from the weights": ("", "memory.gradients=host"),
    "rewards over islands": ("island=2", REWARDED),
    "rewards with dropout": ("", f"{REWARDED} model.dropout=0.1"),
    "rewards with dropout of adapters": ("", f"{REWARDED} adapter.rank=2 adapter.dropout=0.1"),
    "rewards with drawn modules": ("", f"{REWARDED} model.small_ffn=4"),
    "a critic of no method": ("", f"{REWARDED} {CRITIC}"),
    "settings of a critic that shares all": ("", f"{REWARDED} rl.method=ppo roles.critic.optimizer.lr=0.1"),
    "a critic apart beside an adapter": ("", f"{REWARDED} rl.method=ppo {CRITIC} adapter.rank=2"),
    "a critic apart that is not on the device": ("", f"{REWARDED} rl.method=ppo {CRITIC} memory.moments=host"),
    "a critic apart under layouts that plan one model": (
        "dp=2,ep=2,placement=moving", f"{REWARDED} rl.method=ppo {CRITIC} model.experts=2"),
    "a critic apart of a plugin's model": ("", f"{PLUGGED} model={{kind='mixed'}} {REWARDED} rl.method=ppo {CRITIC}"),
    "rewards with balance": ("cp=2,zero=1,balance=greedy", REWARDED),
    "rewards without gradients": ("", f"{REWARDED} optimizer.estimate=zeroth-order optimizer.kind=sgd"),
    "rewards of combined replicas": ("dp=4", f"{REWARDED} resilience.aggregate=trimmed-mean resilience.faulty=1"),
    "room for weights that do not leave": ("", "memory.buffer=2"),
    "reads ahead of nothing": ("", "memory.read_ahead=false"),
    "blocks of what stays": ("", "memory.blocks=2"),
    "alternating updates away from the host": ("", "memory.alternate=0.5"),
    "alternating updates that ask other ranks": (
        "shard=2", "memory.weights=host memory.alternate=0.5 optimizer.kind=muon"),
    "weights in files with balance": ("cp=2,zero=1,balance=greedy", "memory.weights=file"),
    "files with post-validation": ("pp=2", "memory.moments=file optimizer.post_validation=true"),
    "speculation with islands or balance": ("island=2", "memory.speculate=all sync.every=2"),
    "speculation with directions": ("", "memory.speculate=all optimizer.kind=galore"),
    "offloaded activations with selective recompute": ("", "memory.activations=host train.recompute=selective"),
    "post-validation without pp": ("", "optimizer.post_validation=true"),
    "chosen experts without experts in files": ("", "memory.experts=chosen"),
    "small moments without AdamW": ("", "optimizer.state=8bit optimizer.kind=lion"),
    "use of no average": ("", "optimizer.use_ema=true"),
    "export of no adapter": ("", "checkpoint.export=adapter"),
    "before without an origin": ("", "generate.before=true"),
    "tasks with vocabulary passes": ("pp=2,vocab_barriers=1", "tasks=[{path='questions.jsonl'}]"),
    "a plugin's model cut within": ("tp=2", f"{PLUGGED} model={{kind='mixed'}}"),
    "a plugin's model without blocks": ("", f"{PLUGGED} model={{kind='mixed'}} train.recompute=full"),
    "export of a plugin's model": ("", f"{PLUGGED} model={{kind='mixed'}} checkpoint.export=model"),
    "a plugin's model with pairs": ("", f"{PLUGGED} model={{kind='mixed'}} {PAIRS} loss.kind=dpo"),
    "a plugin's loss with vocabulary passes": ("pp=2,vocab_barriers=1", f"{PLUGGED} loss.kind=focal"),
    "tasks of a model that scores": ("", f"{PAIRS} loss.kind=reward tasks=[{{path='questions.jsonl'}}]"),
    "zeroth order with other passes": ("pp=4,skip=0.25", "optimizer.estimate=zeroth-order"),
    "pairs without zeroth order": ("dp=2", "optimizer.pairs=true"),
    "pairs with a rank left over": ("dp=3", "optimizer.pairs=true optimizer.estimate=zeroth-order"),
    "update in backward with clipping": ("", "optimizer.in_backward=true"),
    "update in backward with pp": ("pp=2", "optimizer.in_backward=true optimizer.clip=0"),
    "update in backward with balance": ("dp=2,zero=1,balance=greedy", "optimizer.in_backward=true optimizer.clip=0"),
    "update in backward with an offloaded state": (
        "",
        "optimizer.in_backward=true optimizer.clip=0 memory.weights=host",
    ),
    "faulty replicas of a mean": ("dp=2", "resilience.faulty=1"),
    "too few replicas for so many faulty": ("dp=4", "resilience.faulty=1 resilience.aggregate=krum"),
    "a code without stragglers": ("dp=2", "resilience.code=gradient"),
    "bursts that do not fit the window": (
        "dp=2", "resilience.code=sr-sgc resilience.stragglers=1 resilience.burst=2 resilience.window=4"),
    "bursts beyond the window": ("dp=2", "resilience.code=m-sgc resilience.stragglers=1 resilience.burst=2"),
    "a code with experts": ("dp=2", "resilience.code=gradient resilience.stragglers=1 model.experts=2"),
    "combined replicas that are cut": ("dp=3,tp=2", "resilience.faulty=1 resilience.aggregate=flag"),
    "combined replicas with a state apart": ("dp=1", "resilience.aggregate=flag memory.weights=host"),
    "4bit moments at odd columns": ("tp=2", "optimizer.state=4bit model.ffn=10"),
    "balance with pairs": (
        "cp=2,zero=1,balance=greedy",
        "data.kind=preference data.path=x loss.kind=dpo",
    ),
    "vocabulary passes without a vocabulary": (
        "pp=2,vocab_barriers=1",
        "data.kind=preference data.path=x loss.kind=reward",
    ),
    "adapter under a new head": ("", "data.kind=preference data.path=x loss.kind=reward adapter.rank=2"),
    "dropout without backward": ("", "adapter.dropout=0.1 optimizer.estimate=zeroth-order"),
    "rows of tokens with vocabulary passes": ("pp=2,vocab_barriers=1", "adapter.tokens=[3]"),
    "drawn modules without backward": ("", "model.small_ffn=4 optimizer.estimate=zeroth-order"),
    "dropout of layers without backward": ("", "model.dropout=0.1 optimizer.estimate=zeroth-order"),
    "dropout of layers with compile": ("", "model.dropout=0.1 train.compile=true"),
    "drawn modules with compile": ("", "model.small_ffn=4 train.compile=true"),
    "dropout with compile": ("", "adapter.dropout=0.1 train.compile=true"),
    "islands with balance": ("island=2,dp=2,zero=1,balance=greedy", ""),
    "islands with weights that rest or move": ("island=2", "memory.weights=file"),
    "islands with pairs or codes": (
        "island=2,dp=2", "optimizer.pairs=true optimizer.estimate=zeroth-order sync.every=2"),
    "fragments of what goes whole": ("island=2", "sync.fragments=2"),
    "an answer after the next question": ("island=2", "sync.update=streaming sync.delay=2 sync.every=2"),
    "neighbours that make one model": ("island=2", "sync.update=co2 sync.partner=ring"),
    "a graph of other islands": ("island=2", "sync.partner=graph"),
    "a graph for nobody": ("island=2", "sync.graph=[[0,1]]"),
    "second moments of neighbours": ("island=2", "sync.update=a2cid2 sync.moments=neighbours optimizer.kind=sgd"),
    "exchanges that DADAO requires": ("island=2", "sync.update=dadao sync.exchanges=0.5"),
    "compressed neighbours": ("island=2", "sync.compress=int8 sync.update=noloco"),
    "a way back without one there": ("island=2", "sync.compress_back=int8"),
    "judged answers without a whole step's passes": (
        "dp=3", "loss.kind=kto data.kind=feedback data.path=x.jsonl resilience.aggregate=krum"),
    "settings for what has none": ("island=2", "sync.allocate=2 sync.compress=sign"),
    "islands that never agree": ("island=2", "sync.every=1000"),
    "routes without islands": ("pp=2", "sync.routes=random"),
    "routes without stages": ("island=2", "sync.routes=random"),
    "routes over several stages of a rank": ("island=2,pp=2,schedule=dualpipe", "sync.routes=random"),
    "routes with shares of the vocabulary": ("island=2,pp=2,vocab_barriers=1", "sync.routes=random"),
    "routes of other models": ("island=2,pp=2", "sync.routes=random model.experts=2"),
    "routes of answers": ("island=2,pp=2", f"sync.routes=random {PAIRS} loss.kind=dpo"),
    "keys of images in a scheme of tokens": ("cp=2,context=ring", PICTURES),
    "images in a plan of documents": ("shard=2,zero=1,balance=greedy", PICTURES),
    "images in parts of layers": ("pp=2,vocab_barriers=1", PICTURES),
    "images in compiled blocks": ("", f"{PICTURES} train.compile=true"),
    "islands that end early": ("island=2", "validation.patience=2"),
    "tp above heads": ("tp=5", ""),
    "tp above ffn": ("tp=3", "model.ffn=2"),
    "ep without experts": ("dp=2,ep=2", ""),
    "placement without ep": ("dp=2,placement=sharded", ""),
    "placement with post-validation": ("pp=2,dp=2,ep=2,placement=sharded",
                                       "model.experts=2 optimizer.post_validation=true"),
    "moving experts with shared state": ("shard=4,ep=2,placement=moving", "model.experts=2"),
    "moving experts in pieces": ("dp=4,ep=4,placement=moving", "model.experts=2"),
    "moving experts with such an optimizer": ("dp=2,ep=2,placement=moving", "model.experts=2 optimizer.kind=muon"),
    "ep above experts": ("dp=4,ep=4", "model.experts=3"),
    "pieces of experts with rows and columns": ("dp=4,ep=4", "model.experts=2 optimizer.kind=adafactor"),
    "ep with secondary": ("shard=4,ep=2,secondary=2", ""),
    "means of tokens that go nowhere": ("dp=2,lsh=2", ""),
    "two levels without nodes": ("dp=4,ep=4,dispatch=two-level,node=3", "model.experts=4"),
    "tp above expert ffn": ("tp=3", "model.experts=2 model.expert_ffn=2"),
    "tp above vocab": ("tp=3", "model.vocab=2"),
    "ulysses that does not divide": ("cp=3,ulysses=2", ""),
    "ulysses above heads": ("cp=5,context=ulysses", ""),
    "stages without pp": ("vocab_barriers=1", ""),
    "overlap of a ladder": ("pp=2,overlap=passes", "model.experts=4 model.residual=ladder"),
    "overlap without exchanges": ("pp=2,overlap=passes", ""),
    "overlap with other tables": ("pp=2,overlap=passes,vocab_barriers=1", "model.experts=2"),
    "overlap of sharded parameters": ("pp=2,shard=2,overlap=passes", "model.experts=2"),
    "overlap with recomputation": ("pp=2,overlap=passes", "model.experts=2 train.recompute=full"),
    "overlap over one rank": ("overlap=domino", ""),
    "parts without overlap": ("tp=2,parts=2", ""),
    "overlap with compile": ("tp=2,overlap=domino", "train.compile=true"),
    "overlap with balance": ("tp=2,dp=2,overlap=domino,balance=greedy,zero=1", ""),
    "overlap with a chosen sum": ("tp=2,overlap=domino,sum=ring", ""),
    "cut rows under cp": ("tp=2,cp=2,overlap=tokens", ""),
    "cut rows with experts": ("tp=2,overlap=tokens", "model.experts=2"),
    "cut rows with linear attention": ("tp=2,overlap=tokens", "model.mixer=linear"),
    "skip with a schedule": ("pp=4,skip=0.25,schedule=gpipe", ""),
    "skip of too many stages": ("pp=4,skip=0.5", ""),
    "no such schedule": ("pp=2,schedule=1f1c", ""),
    "odd pp with two flows": ("pp=3,schedule=dualpipe", ""),
    "virtual stages of a fixed schedule": ("pp=2,schedule=1f1b,virtual=2", ""),
    "more stages than layers": ("pp=4,schedule=zb-v", ""),
    "balance without ZeRO-1": ("dp=2,balance=greedy", ""),
    "balance with pp": ("pp=2,zero=1,balance=greedy", ""),
    "balance with Ulysses": ("cp=2,zero=1,balance=greedy,context=ulysses", ""),
    "balance with linear attention": ("cp=2,zero=1,balance=greedy", "model.mixer=linear"),
    "latent attention with other kinds": ("", "model.kv_rank=4 model.qk_norm=true"),
    "window with linear attention": ("", "model.window=4 model.mixer=linear"),
    "balance of documents with balance of experts":
        ("cp=2,zero=1,balance=greedy", "model.experts=2 model.balance_loss=0.1"),
    "balance of documents with capacity": ("dp=2,zero=1,balance=greedy", "model.experts=2 model.capacity=1.0"),
    "balance over all layers with pp":
        ("pp=2", "model.experts=2 model.balance=huggingface model.balance_loss=0.1"),
    "balance over all layers with weights in files": (
        "", "memory.weights=file model.experts=2 model.balance=huggingface model.balance_loss=0.01"),
    "router statistics with post-validation":
        ("pp=2", "model.experts=2 model.router=sigmoid optimizer.post_validation=true"),
    "balance of experts with zeroth order": ("", "model.experts=2 model.z_loss=0.1 optimizer.estimate=zeroth-order"),
    "timed dispatch with recompute": ("dp=2,ep=2,dispatch=timed", "model.experts=2 train.recompute=full"),
    "timed dispatch in pieces": ("dp=2,ep=2,dispatch=timed,pieces=2", "model.experts=2"),
    "experts with compile": ("", "model.experts=2 train.compile=true"),
    "balance with compile": ("cp=2,zero=1,balance=greedy", "train.compile=true"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "tiny.toml"
    path.write_text(
        "[model]\nlayers = 2\nembed = 16\nheads = 4\nffn = 8\n[data]\nseq_len = 8\n"
    )
    return str(path)


#: How each technique that fills phases of a step is asked for: a layout and settings.
ASKED = {
    "tiled-weights": ("", TILES),
    "embedding-rows": ("", ROWS),
    "zeroth-order": ("", "optimizer.estimate=zeroth-order"),
    "post-validation": ("pp=2", "optimizer.post_validation=true"),
    "in-backward": ("", "optimizer.in_backward=true optimizer.clip=0"),
    "speculation": ("", "memory.speculate=all"),
    "alternating-updates": ("", "memory.weights=host memory.alternate=0.5"),
    "gradient-code": ("dp=4", "resilience.code=gradient resilience.stragglers=1"),
    "aggregation": ("dp=4", "resilience.aggregate=flag"),
    "summed-islands": ("island=2", ""),
    "separate-islands": ("island=2", "sync.every=2"),
    "routed-stages": ("island=2,pp=2", "sync.routes=random"),
    "distillation": ("", TAUGHT),
    "federated-server": ("", "federated.listen=localhost:7800"),
    "federated-client": ("", "federated.join=invitation federated.name=a"),
    "corrected-gradients": (
        "",
        "federated.policy=fedavg-m federated.join=invitation federated.name=a",
    ),
}


def asked_together(a: Registered, b: Registered) -> tuple[str, str]:
    """A layout and settings that ask for both."""
    pair = [ASKED[a.name], ASKED[b.name]]
    layout, settings = ([each[i] for each in pair if each[i]] for i in (0, 1))
    axes = dict.fromkeys(axis for each in layout for axis in each.split(","))
    return ",".join(axes), " ".join(settings)


PAIRED = [
    (a, b)
    for a, b in combinations(declared("phases"), 2)
    if {a.name, b.name} != {"summed-islands", "separate-islands"}
]


@pytest.mark.parametrize(("a", "b"), PAIRED, ids=lambda each: each.name)
def test_two_techniques_that_fill_one_phase_are_refused_in_one_line(
    tiny: str, a: Registered, b: Registered
) -> None:
    """Whichever two: the line names the settings of both and the phase; those that share no phase have no such line."""
    layout, settings = asked_together(a, b)
    shared = a.implementation.fills & b.implementation.fills
    try:
        load_recipe(tiny, settings.split(), layout)
    except Conflict as refusal:
        together = {f"{a.name} with {b.name}", f"{b.name} with {a.name}"}
        assert (refusal.rule in together) is bool(shared)
        if shared:
            for each in (a, b):
                keys = [word.split("=")[0] for word in ASKED[each.name][1].split()]
                assert any(key in str(refusal) for key in keys or ["islands"])
            assert "; leave one of them out" in str(refusal)
    else:
        assert not shared


def test_a_technique_fills_the_phases_where_it_is_asked_for_only(tiny: str) -> None:
    """Every other leaf may be missing."""
    others = [technique.module for technique in declared("phases")]
    for name in ("in-backward", "zeroth-order", "alternating-updates", ""):
        recipe = load_recipe(tiny, ASKED[name][1].split() if name else [])
        asked = {each.module for each in declared("phases") if each.name == name}
        missing = {module: None for module in others if module not in asked}
        mesh, shape = Mesh.single(), recipe.model.model_copy(update={"vocab": 257})
        built = build_for_training(shape, mesh, recipe)
        with mock.patch.dict(sys.modules, missing):
            step = build_step(StepContext(*built, mesh), recipe)
            modules = {type(filler).__module__ for filler in step.fillers}
            assert {module.rpartition(".")[0] for module in modules} == asked


def test_every_entry_has_a_smallest_layout() -> None:
    assert sorted(rule.name for rule in every_rule()) == sorted(SMALLEST)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", [name for name in SMALLEST if name != GENERATION])
def test_refused_by_everything_with_the_same_reason(
    command: Command, tiny: str, name: str
) -> None:
    layout, settings = SMALLEST[name]
    words = [w for s in settings.split() for w in ("--set", s)]
    with pytest.raises(Conflict) as refused:
        recipe = load_recipe(tiny, settings.split(), layout)
        check_fits(
            recipe.model, recipe.layout, recipe.train, recipe.optimizer, recipe.memory
        )
    assert refused.value.rule == name
    said = [
        command(*call, tiny, "--layout", layout, *words)
        for call in (["train"], ["verify"], ["verify", "--types"])
    ]
    assert {code for code, _, _ in said} == {2}
    assert len({err for _, _, err in said}) == 1
    assert str(refused.value) in " ".join(said[0][2].split())


def test_refused_where_ranks_generate() -> None:
    """A recipe with a chosen sum is refused for another reason before."""
    layout = Layout.parse(SMALLEST[GENERATION][0])
    with pytest.raises(Conflict) as refused:
        check_fits(ModelShape(vocab=9, layers=1, embed=8, heads=2), layout)
    assert refused.value.rule == GENERATION


@pytest.mark.parametrize(
    "path", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem
)
def test_every_recipe_fits_its_layout_and_one_device(path: Path) -> None:
    recipe = load_recipe(path)
    if recipe.model.kind:  # types are known of models of tokens
        return
    shape = recipe.model.model_copy(update={"vocab": recipe.model.vocab or 257})
    assert check_types(shape, recipe.layout, recipe.train, loss=recipe.loss) is None
    alone = on_one_device(recipe)  # with which weft verify compares
    check_fits(shape, Layout(), alone.train, alone.optimizer, alone.memory)


@pytest.mark.parametrize(
    "layout",
    [
        "pp=8,schedule=zb-v,tp=8",
        "pp=16,schedule=dualpipe,shard=4",
        "pp=8,vocab_barriers=1",
    ],
)
def test_the_types_of_a_deep_model_fit(layout: str) -> None:
    change = [
        "model.layers=80",
        "model.embed=64",
        "model.heads=64",
        "model.kv_heads=8",
        "model.head_dim=2",
    ]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.toml", change, layout)
    shape = recipe.model.model_copy(update={"vocab": 257})
    assert check_types(shape, recipe.layout, recipe.train) is None
