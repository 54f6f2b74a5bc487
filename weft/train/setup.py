"""What must be known, and can be refused, before a rank starts or a folder is made."""

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import psutil
import torch

from weft.data.balance import costs_of
from weft.data.loader import Corpus, Loader, open_data
from weft.data.order import Order
from weft.data.tokenizer import Tokenizer
from weft.data.tokens import Progress
from weft.errors import UsageError, WeftError, nearest
from weft.layout.layout import MODEL_AXES
from weft.layout.mesh import Mesh
from weft.models.adapters import PROJECTIONS, is_target, learns, projections
from weft.models.transformer import Transformer
from weft.models.values import Values
from weft.observe.flops import parameter_count
from weft.observe.trackers import check_trackers
from weft.parallel.build import check_fits, parallelize
from weft.parallel.state import State
from weft.recipe import ModelShape, Recipe, Train
from weft.train.optim import RuleOptimizer, slot_bytes


@dataclass(frozen=True)
class Job:
    """A recipe with everything looked up: open data, and the complete shape of the model. ``notes`` are to be said."""

    recipe: Recipe
    shape: ModelShape
    corpus: Corpus
    notes: tuple[str, ...] = ()

    def loader(self, order: Order, mesh: Mesh) -> Loader:
        rows, passes = self.recipe.rows_per_pass(mesh.layout)
        data = self.recipe.data
        # Only steps that train gather parameters once, which a balanced step needs.
        costs = costs_of(self.shape) if mesh.layout.balance and order is self.corpus.train else None
        return Loader(
            order, mesh.layout, mesh.batch_rank, mesh.rank("cp"), self.recipe.train.batch, rows, passes, data.seq_len,
            costs,
        )  # fmt: skip


def device_type(recipe: Recipe) -> str:
    """``cpu`` or ``cuda``, as the recipe asks or the machine offers."""
    wanted = recipe.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("train.device = 'cuda' but PyTorch sees no GPU; use device = 'cpu' or 'auto'")
    return wanted if wanted != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")


def prepare(recipe: Recipe, progress: Progress | None = None) -> Job:
    """Open the data, complete the model's shape and check that layout, model, data and memory go together."""
    shape = model_shape(recipe)
    check_fits(shape, recipe.layout, recipe.train, recipe.optimizer)
    check_names(shape, recipe.train)
    corpus = open_data(recipe.data, progress)
    vocab = corpus.tokenizer.vocab
    if shape.vocab and vocab > shape.vocab:
        raise UsageError(
            f"tokenizer {recipe.data.tokenizer!r} has {vocab} entries but the model's vocabulary is {shape.vocab}; "
            "set model.vocab = 0 to take the tokenizer's size, or use the model's own tokenizer"
        )
    shape = shape.model_copy(update={"vocab": shape.vocab or vocab})
    check_fits(shape, recipe.layout, recipe.train, recipe.optimizer)
    _check_memory(recipe, shape)
    check_trackers(recipe.observe.trackers)
    return Job(recipe, shape, corpus, _tokenizer_notes(recipe, corpus.tokenizer))


def assemble(shape: ModelShape, mesh: Mesh, recipe: Recipe, values: Values | None = None) -> tuple[Transformer, State]:
    """The model under ``mesh`` and its state, ready for the first step; ``values`` as of :func:`parallelize`."""
    model, state = parallelize(shape, mesh, recipe.train, values, recipe.data.seq_len)
    state.optimize(RuleOptimizer(recipe.optimizer, mesh))
    return model, state


def check_names(shape: ModelShape, train: Train) -> None:
    """Refuse targets of adapters and patterns of ``train.freeze`` that match nothing, or leave nothing to learn."""
    for pattern in shape.adapter.targets if shape.adapter else ():
        if not any(is_target(pattern, path) for path in projections(shape)):
            known = [name for names in PROJECTIONS.values() for pair in names.items() for name in pair]
            raise UsageError(
                f"adapter.targets: {pattern!r} matches no weight of this model; {nearest(pattern, known)}, or a path "
                "such as blocks.0.attention.*"
            )
    if not train.freeze:
        return
    names = [name for name, _ in Transformer(shape, Mesh.single()).logical_parameters()]
    for pattern in train.freeze:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"train.freeze: {pattern!r} matches no parameter; {nearest(pattern, names)}")
    if not any(learns(name, shape, train.freeze) for name in names):
        raise UsageError("train.freeze leaves nothing to learn; leave out a pattern")


def model_shape(recipe: Recipe) -> ModelShape:
    """The model with its adapter: the model section, with ``config`` (or that of ``weights``) read if it is given."""
    shape = _base_shape(recipe)
    return shape if recipe.adapter is None else shape.model_copy(update={"adapter": recipe.adapter})


def _base_shape(recipe: Recipe) -> ModelShape:
    given = recipe.model
    source = given.config or given.weights
    if source is None:
        return given
    from weft.checkpoint.weights import shape_of
    from weft.model_config import shape_from_config

    if given.weights:
        _check_weights(given.weights)
    shape = shape_from_config(given.config) if given.config else shape_of(source)
    named = given.model_fields_set - {"config", "weights"} - ({"vocab"} if not given.vocab else set())
    if ignored := [name for name in sorted(named) if getattr(given, name) != getattr(shape, name)]:
        first, key = ignored[0], "config" if given.config else "weights"
        raise UsageError(
            f"model.{first} = {getattr(given, first)!r}, but model.{key} = {str(source)!r} is of a model with "
            f"{getattr(shape, first)!r}, and that counts; leave out {', '.join(f'model.{name}' for name in ignored)}"
        )
    return shape.model_copy(update={"config": given.config, "weights": given.weights})


def _check_weights(where: Path) -> None:
    """Refuse files, and what other programs than Hugging Face's have written: ``weft checkpoint convert`` reads it."""
    from weft.checkpoint.convert.sources import kind_of

    kind = kind_of(where)
    if kind not in ("weft", "hf", None):
        raise UsageError(
            f"model.weights = {str(where)!r} is a checkpoint of kind {kind}; make one of Weft's of it: weft checkpoint "
            f"convert {where} --out DIR, and set model.weights = 'DIR'"
        )
    if where.is_file():
        raise UsageError(f"model.weights = {str(where)!r} is a file; give the folder, with the config.json in it")


def _tokenizer_notes(recipe: Recipe, tokenizer: Tokenizer) -> tuple[str, ...]:
    """What to say of weights that were trained with another tokenizer; refused where the recipe names none at all."""
    if recipe.model.weights is None:
        return ()
    from weft.checkpoint.weights import stored_tokenizer

    stored, where = stored_tokenizer(recipe.model.weights)
    if stored is not None and stored.fingerprint == tokenizer.fingerprint:
        return ()
    if "tokenizer" not in recipe.data.model_fields_set:
        own = f"one of their own, of {stored.vocab} entries" if stored else "none beside them"
        fix = repr(where) if stored else "the path of theirs"
        raise UsageError(
            f"model.weights = {str(recipe.model.weights)!r} needs its own tokenizer, and data.tokenizer is left at "
            f"{recipe.data.tokenizer!r}; the weights have {own}: set data.tokenizer = {fix}"
        )
    if stored is None:
        return ()
    return (f"data.tokenizer = {recipe.data.tokenizer!r} is not the tokenizer of the weights, which is {where!r}",)


def state_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of all parameters, and of the gradients and moments of those that learn."""
    train, wide = recipe.train, 8 if recipe.train.dtype == "float64" else 4
    learning = 2 * wide + slot_bytes(recipe.optimizer, wide)
    if shape.adapter is None and not train.freeze:
        return learning * parameter_count(shape, shape.vocab)
    frozen = 2 if train.dtype == "bfloat16" else wide
    return sum(
        p.numel() * (learning if learns(name, shape, train.freeze) else frozen if p.is_floating_point() else 1)
        for name, p in Transformer(shape, Mesh.single()).named_parameters()
    )


def _check_memory(recipe: Recipe, shape: ModelShape) -> None:
    """Refuse what cannot even hold its own state: parameters, gradients and moments, before any activation."""
    parameters = parameter_count(shape, shape.vocab)
    need = state_bytes(shape, recipe) / recipe.layout.size("pp", "shard", "cp", *MODEL_AXES)
    cuda = device_type(recipe) == "cuda" and not recipe.train.offloads_state
    if cuda:
        free, ranks = torch.cuda.get_device_properties(0).total_memory, 1
    else:  # this machine holds as many ranks as the launcher says, else all
        free, ranks = psutil.virtual_memory().available, int(os.environ.get("LOCAL_WORLD_SIZE", recipe.layout.world))
    if need * ranks > free:
        raise WeftError(
            f"too little memory: {parameters / 1e9:.2f}B parameters need {need * ranks / 2**30:.1f} GiB for weights, "
            f"gradients and optimizer state, and this {'device' if cuda else 'machine'} has {free / 2**30:.1f}; "
            "raise layout.shard or layout.tp, or choose a smaller model"
        )
