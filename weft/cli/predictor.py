"""``weft predictor``: train what says which neurons of a model will be active."""

from pathlib import Path
from typing import Annotated

import typer

from weft.cli.arguments import Ema, ModelName
from weft.cli.console import warn


def predictor_command(
    checkpoint: Annotated[str, ModelName],
    texts: Annotated[
        Path, typer.Option(metavar="FILE", help="A file with text to learn from.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The predictor's new file.")
    ],
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of each layer's predictor.")
    ] = 64,
    recall: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Share of the active neurons that are to be found."
        ),
    ] = 0.99,
    passes: Annotated[
        int, typer.Option(min=0, help="How often all of the text is learned from.")
    ] = 3,
    ema: Ema = False,
) -> int:
    """Train a predictor of a ReLU model's active neurons, for weft generate --neurons-in."""
    from weft.checkpoint.convert.routing import text_of
    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.generate.predictor_training import train_predictors
    from weft.memory.neuron_predictor import gate_hashes, write_predictor
    from weft.new_folder import check_new
    from weft.writable import check_writable

    check_new(out)
    check_writable(out, "--out")
    text = text_of(texts)
    model, files, _ = open_model(checkpoint, "cpu", warn, ema)
    ids = tokenizer_of(files, checkpoint).prompt_ids(text)
    trained = train_predictors(model, ids, rank, recall, passes, print)
    held = dict(model.named_parameters())
    gates = gate_hashes(model, lambda name, logical, box: held[name].detach())
    write_predictor(out, trained.layers, gates)
    print(f"written to {out}; weft generate --neurons-in FOLDER --predictor {out}")
    return 0
