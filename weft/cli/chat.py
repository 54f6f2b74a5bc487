"""``weft chat``: talk to a model in the terminal."""

import sys
from typing import Annotated

import typer
from rich.console import Console

from weft.cli.arguments import Ema, Seed, Temperature, TopP, Weights
from weft.cli.cache_policy_option import CachePolicyWord
from weft.cli.console import warn
from weft.errors import UsageError

_model = (
    "A run, a checkpoint, a Hugging Face folder, a GGUF file or an id of the hub; or the address of a server such as "
    "http://127.0.0.1:8000 (its key from OPENAI_API_KEY)."
)


def chat_command(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL", help=_model)],
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens in an answer.")
    ] = 1024,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    weights: Weights = "float",
    ema: Ema = False,
    cache_policy: CachePolicyWord = "none",
) -> int:
    """Talk to a model: each line is a message, and answers appear as they are written; also from a pipe."""
    from weft.serve.talk import key_of_environment, model_speaker, server_speaker, talk

    if model.startswith(("http://", "https://")):
        if cache_policy != "none":
            raise UsageError(
                "--cache-policy is for a model that is read here; give it to the server, or leave it out"
            )
        asked = {
            "max_tokens": tokens,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
        }
        speaker = server_speaker(model, key_of_environment(), asked)
    else:
        from weft.generate.sampling import Sampling

        how = Sampling(temperature, 0, top_p, seed=seed)
        with Console(stderr=True, quiet=not sys.stderr.isatty()).status(
            f"reading {model}"
        ):
            speaker = model_speaker(
                model, tokens, how, weights, ema, warn, cache_policy
            )
    talk(speaker, system)
    return 0
