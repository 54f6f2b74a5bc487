"""Count the experts that a task's tokens choose, and export models with experts reordered or removed accordingly.

Experts that no token chooses can be removed. Experts of successive layers that the same tokens choose can get close
numbers, so that they are on one rank where experts are distributed in their order, as in ``weft generate``. The order
of a layer's experts does not change its output.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from weft.checkpoint.model import open_model, tokenizer_of
from weft.errors import UsageError
from weft.models.adapters import base_of, merged_parameters
from weft.models.hugging_face import export, exported_dtype
from weft.models.router import Choice, Router
from weft.models.transformer import Transformer
from weft.new_folder import check_new
from weft.parallel.experts import affinity
from weft.recipe import ModelShape

T = torch.Tensor

#: Tokens of a text that are read together.
TOKENS = 512


def text_of(texts: Path) -> str:
    """Return the content of the file ``texts`` (option ``--texts``).

    Raises :class:`UsageError` if it cannot be read.
    """
    try:
        return texts.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--texts {texts} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


@torch.inference_mode()
def chosen_experts(model: Transformer, ids: Sequence[int]) -> list[np.ndarray]:
    """Return the experts that a text's tokens are routed to: an array ``[tokens, k]`` for each layer with experts.

    ``model``: the model whose routers choose. ``ids``: token ids of the text. ``k`` is the number of experts per token.
    """
    chosen: dict[int, list[T]] = defaultdict(list)

    def keep(router: Router, given: object, choice: Choice) -> None:
        chosen[router.layer].append(choice.ids.cpu())

    routers = [module for module in model.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(keep) for router in routers]
    for at in range(0, len(ids), TOKENS):
        tokens = torch.tensor([ids[at : at + TOKENS]], device=model.mesh.device)
        positions = torch.arange(tokens.shape[1], device=model.mesh.device)[None]
        model(
            tokens,
            positions,
            torch.tensor([0, tokens.shape[1]], dtype=torch.int32),
            only=slice(0),
        )
    for hook in hooks:
        hook.remove()
    return [torch.cat(chosen[router.layer]).numpy() for router in routers]


def most_chosen(
    chosen: Sequence[np.ndarray], shape: ModelShape, keep: int
) -> tuple[list[list[int]], str]:
    """Choose the experts to keep when a model is reduced to those that some texts use.

    Returns, for each layer, the ascending numbers of its ``keep`` most chosen experts, and a line for the user that
    says how many choices fell on other experts. ``chosen``: the experts of each token, by layer
    (:func:`chosen_experts`). Raises :class:`UsageError` if ``keep`` is less than the experts per token or more than the
    experts of a layer. The error is also raised for a router that does not normalise the weights of a token's experts:
    with fewer experts these weights would be larger than in training.
    """
    counts = list(shape.mixtures.values())
    if not shape.experts_per_token <= keep <= min(counts):
        raise UsageError(f"--keep {keep} is not possible: layers have {min(counts)} experts, of which a token chooses "
                         f"{shape.experts_per_token}; keep as many as lie between")  # fmt: skip
    if shape.router == "pre-softmax" and not shape.router_norm:
        raise UsageError("--keep is for routers whose weights add up to one: in this model what is left would weigh "
                         "more than before; leave it out")  # fmt: skip
    often = affinity.loads_of(chosen, counts)
    kept = [
        np.sort(np.argsort(-layer_counts, kind="stable")[:keep])
        for layer_counts in often
    ]
    lost = sum(
        int(layer_counts.sum() - layer_counts[ids].sum())
        for layer_counts, ids in zip(often, kept, strict=True)
    )
    said = f"{keep} of {max(counts)} experts kept in each layer; {lost:,} of {sum(map(np.size, chosen)):,} choices were"
    same = "" if lost else ", so that it computes the same for these texts"
    return [ids.tolist() for ids in kept], f"{said} of others{same}"


def best_order(
    chosen: Sequence[np.ndarray],
    shape: ModelShape,
    ranks: int,
    level: float,
    most_load: float = 0.0,
) -> tuple[list[list[int]], str]:
    """Return an order of each layer's experts in which few tokens move between ranks, and a line about its effect.

    The order is a list of expert numbers for each layer. If it is cut into ``ranks`` equal parts, part ``r`` has the
    experts of rank ``r``.

    Arguments:
        ``chosen``: the experts of each token, by layer (:func:`chosen_experts`).
        ``level``: weight of even loads of the ranks, relative to tokens that stay on their rank; 0: loads do not count.
        ``most_load``: if above 0, integer programs place the experts, and the load of a rank is at most this multiple
            of the least possible load.

    Raises :class:`UsageError` if a layer has fewer experts than ranks.
    """
    counts = list(shape.mixtures.values())
    if ranks > min(counts):
        raise UsageError(
            f"--place {ranks} is more ranks than the {min(counts)} experts of a layer; give fewer"
        )
    steps, loads = (
        affinity.steps_between(chosen, counts),
        affinity.loads_of(chosen, counts),
    )
    drawn = affinity.random_owners(counts, ranks)
    if most_load:
        from weft.parallel.experts.integer_placement import place_by_programs

        owners = place_by_programs(steps, loads, ranks, most_load).owners
    else:
        owners = affinity.place_experts(steps, loads, ranks, level)
    said = (
        f"{affinity.share_that_stays(steps, owners):.1%} of the steps from layer to layer stay on one of {ranks} "
        f"ranks (of a random order {affinity.share_that_stays(steps, drawn):.1%}); the most loaded has "
        f"{affinity.largest_load(loads, owners):.2f} of the mean ({affinity.largest_load(loads, drawn):.2f})"
    )
    return affinity.experts_by_slot(owners), said


def with_experts(
    values: Mapping[str, T], experts: Mapping[int, Sequence[int]]
) -> dict[str, T]:
    """Return the parameters ``values`` (by name) with only the given experts of some layers, in the given order.

    ``experts``: for each layer that is changed, the numbers of the experts to keep. Of the router's weight the rows of
    the same experts are selected.
    """
    reordered = dict(values)
    for layer, ids in experts.items():
        for name in values:
            if name.startswith(
                (f"blocks.{layer}.ffn.router.", f"blocks.{layer}.ffn.experts.")
            ):
                reordered[name] = values[name][list(ids)]
    return reordered


def export_for_texts(
    checkpoint: str, out: Path, texts: Path, warn: Callable[[str], None], ema: bool = False, keep: int = 0,
    ranks: int = 0, level: float = 0.0, dtype: str | None = None, most_load: float = 0.0,
) -> str:  # fmt: skip
    """Export a Hugging Face model whose experts are selected, or reordered, for texts like those in the file ``texts``.

    With ``keep``, only the experts that these texts choose most are exported, ``keep`` for each layer. With ``ranks``,
    all experts are exported, in an order in which few tokens move between so many ranks. Adapters are merged. Returns a
    line of text about the effect.

    Arguments:
        ``checkpoint``: address of the model.
        ``out``: the new folder.
        ``warn``: called with a line for each damaged checkpoint that is skipped.
        ``ema``: export the run's moving averages of the parameters.
        ``level``: how much even loads of the ranks count; ``most_load``: limit of the loads (:func:`best_order`).
        ``dtype``: type of the weights; None: the type of the model from which the run started.

    Raises :class:`UsageError` unless exactly one of ``keep`` and ``ranks`` is given.
    """
    check_new(out)
    if bool(keep) == bool(ranks):
        raise UsageError(
            "--texts is for --keep or --place; give one of them, and the other to what the first makes"
        )
    if most_load and (most_load < 1 or level or not ranks):
        raise UsageError(
            f"--most-load {most_load:g} is a multiple, 1 or more, of the least load that --place can reach, and takes "
            "the place of --level; give --place RANKS and a number like 1.05, and leave out --level"
        )
    text = text_of(texts)
    model, files, _ = open_model(checkpoint, "cpu", warn, ema)
    shape, ids = base_of(model.shape), tokenizer_of(files, checkpoint).prompt_ids(text)
    if not shape.mixtures or not text:
        raise UsageError(
            f"{f'{texts} is empty' if shape.mixtures else f'{checkpoint} has no experts'}; give another"
        )
    if shape.router_groups > 1:
        raise UsageError(f"the router of {checkpoint} chooses from groups, which must stay as they are; leave out "
                         "--texts")  # fmt: skip
    chosen = chosen_experts(model, ids)
    order, said = (
        most_chosen(chosen, shape, keep)
        if keep
        else best_order(chosen, shape, ranks, level)
    )
    values = with_experts(
        merged_parameters(model), dict(zip(shape.mixtures, order, strict=True))
    )
    if keep:
        listed = shape.experts if isinstance(shape.experts, tuple) else ()
        shape = shape.model_copy(
            update={"experts": tuple(keep * bool(n) for n in listed) or keep}
        )
    export(values, shape, out, exported_dtype(dtype, files), files)
    return said
