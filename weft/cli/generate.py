"""``weft generate``: continue a text, on one device or on several."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.cli.arguments import (
    Ahead,
    Attention,
    Draft,
    EarlyLayer,
    Ema,
    LayersIn,
    LeastRate,
    ModelName,
    Neurons,
    NeuronsIn,
    PluginModules,
    Predictor,
    Seed,
    Spread,
    Temperature,
    TopP,
    Weights,
    Window,
    import_plugins,
)
from weft.cli.cache_policy_option import CachePolicyWord
from weft.cli.console import plain_console, warn
from weft.cli.engine_options import KeysIn
from weft.errors import UsageError

if TYPE_CHECKING:  # `weft --help` does not wait for PyTorch
    from weft.checkpoint.address import Where
    from weft.recipe import Recipe

_chat = (
    "Treat the prompt as a user's message (or a .json file with messages): "
    "apply the chat template, print the answer."
)

_texts = "Number of texts for one prompt, sampled together; with --beams, the number of likeliest texts."
Texts = Annotated[int, typer.Option(min=1, help=_texts)]
_beams = (
    "Beam search for the likeliest texts with this many beams, instead of sampling."
)
Beams = Annotated[int, typer.Option(min=0, help=_beams)]
_answer = (
    "With --texts: take a majority vote on the last match of this pattern in "
    "each text (on its first group, if it has one). Texts that can no longer "
    "change the result are not finished."
)
_length = (
    "With --beams: how much long texts are favoured; 0: not at all (GNMT's alpha, 0.2)."
)
LengthPenalty = Annotated[float | None, typer.Option(min=0, help=_length)]
_prune = (
    "With --beams: drop tokens and beams whose log-probability is this far below "
    "the best (3 in GNMT). 0 drops none."
)
Prune = Annotated[float, typer.Option(min=0, help=_prune)]
Answer = Annotated[str | None, typer.Option(metavar="REGEX", help=_answer)]
_think = (
    "With --chat: none closes the template's reasoning block, so that the answer begins "
    "at once. A number writes so many texts with reasoning and shows the best answer: by "
    "--answer, by --verifier, or by its mean log-probability. With none, --texts says how many."
)
Think = Annotated[str, typer.Option("--think", metavar="none|N", help=_think)]
_verifier = "With --chat and several texts: a reward model with a chat template, which chooses the answer."
VerifierName = Annotated[
    str, typer.Option("--verifier", metavar="MODEL", help=_verifier)
]
_workers = "Number of texts that are written together, each of which sees the others as they grow (Hogwild)."
Workers = Annotated[int, typer.Option(min=0, help=_workers)]
_paths = (
    "Write the paths into which the model itself splits its text at the same "
    "time (Multiverse models)."
)
Paths = Annotated[bool, typer.Option("--paths", help=_paths)]

_rest = "Where experts that are not in use rest: a folder on a local disk, or host."
_resident = (
    "With --experts-in: the share of the experts kept in memory; if left out, half, and with "
    "--prompts three layers."
)

_prompts = (
    "A file of prompts, one per line (.jsonl: strings, or objects with prompt), which are continued together; "
    "prints a line of JSON for each. With --experts-in, experts move through memory once per pass."
)

_min_p = "Drop tokens that are less likely than this share of the likeliest token."

#: Tokens of a step for each rank along cp: of long prompts as many as fill the processor well.
CHUNK = 2048


def generate_command(
    checkpoint: Annotated[str, ModelName],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with the text.")
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help=_prompts)] = None,
    chat: Annotated[bool, typer.Option("--chat", help=_chat)] = False,
    system: Annotated[
        str | None, typer.Option(help="With --chat: the system message.")
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Largest number of tokens to generate.")
    ] = 120,
    temperature: Temperature = 0.8,
    top_k: Annotated[
        int,
        typer.Option(min=0, help="Sample among this many most likely tokens; 0: all."),
    ] = 40,
    top_p: TopP = 1.0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help=_min_p)] = 0.0,
    repetition: Annotated[
        float,
        typer.Option(
            help=(
                "Repetition penalty: above 1, tokens of the text so far become less "
                "likely."
            )
        ),
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End at this text; may be repeated."),
    ] = None,
    seed: Seed = 0,
    texts: Texts = 1,
    answer: Answer = None,
    think: Think = "",
    verifier: VerifierName = "",
    beams: Beams = 0,
    length_penalty: LengthPenalty = None,
    prune: Prune = 0.0,
    workers: Workers = 0,
    paths: Paths = False,
    ema: Ema = False,
    weights: Weights = "float",
    draft: Draft = "",
    ahead: Ahead = 0,
    early_layer: EarlyLayer = 0,
    attention: Attention = "",
    cache_policy: CachePolicyWord = "none",
    plugin: PluginModules = None,
    layout: Spread = None,
    experts_in: Annotated[str | None, typer.Option(metavar="WHERE", help=_rest)] = None,
    resident: Annotated[
        float | None, typer.Option(min=0, max=1, help=_resident)
    ] = None,
    layers_in: LayersIn = None,
    window: Window = None,
    least_rate: LeastRate = None,
    keys_in: KeysIn = "",
    neurons_in: NeuronsIn = None,
    neurons: Neurons = None,
    predictor: Predictor = None,
) -> int:
    """Continue a text with a trained model, on one rank or on several."""
    import torch

    from weft.checkpoint.model import open_model, tokenizer_of
    from weft.data.chat.encode import prompt_ids, read_messages, reasoning_prompt
    from weft.data.detokenizer import stream_text
    from weft.generate.best_answer import Verifier
    from weft.generate.cache_policy import cache_policy_of, check_alone
    from weft.generate.drafter import check_ahead, drafter_for
    from weft.generate.engine import BUDGET, check_prompt
    from weft.generate.keys_at_rest import RestingKeys, rest_keys
    from weft.generate.leader import follow_leader
    from weft.generate.open_engine import engine_class
    from weft.generate.sampling import Sampling
    from weft.generate.start import as_rank, launch_ranks, leads, mesh_for
    from weft.generate.text_options import TextOptions
    from weft.generate.weights_elsewhere import WeightsElsewhere, lift_of, tell_about
    from weft.layout.layout import Layout
    from weft.memory.heap import use_huge_pages
    from weft.models.products import read_only
    from weft.train.expert_set import (
        open_experts,
        read_expert_set,
        refuse_beside_experts,
    )

    if [prompt, prompt_file, prompts].count(None) != 2:
        raise UsageError(
            "give either --prompt TEXT, --prompt-file FILE or --prompts FILE"
        )
    if "" in (stop or ()):
        raise UsageError("--stop is empty; give a text, or leave it out")
    how = Sampling(temperature, top_k, top_p, min_p, repetition, seed=seed)
    spread, device = (
        Layout.parse(layout or ""),
        "cuda" if torch.cuda.is_available() else "cpu",
    )
    options = TextOptions(
        texts, beams, answer, workers, paths, length_penalty, prune, think, verifier
    )
    options.check_choice(chat)
    options.check(temperature, draft, spread)
    import_plugins(plugin)
    check_ahead(draft, ahead, early_layer, spread.world)
    apart = {"--workers": workers, "--paths": paths, "cp in --layout": spread.cp > 1}
    check_alone(cache_policy, apart, {"--draft": draft, "--beams": beams})
    elsewhere = WeightsElsewhere(
        layers_in=layers_in, window=window, least_rate=least_rate, neurons_in=neurons_in, neurons=neurons,
        predictor=predictor, experts_in=experts_in, resident=resident,
    )  # fmt: skip
    elsewhere.check(weights, spread, device)
    at_rest = RestingKeys.parse(keys_in) if keys_in else None
    if at_rest and (spread.world > 1 or cache_policy != "none"):
        raise UsageError(
            "--keys-in is for one rank that attends to all keys; leave out --layout and --cache-policy"
        )
    if at_rest and (workers or paths):
        raise UsageError(
            "--keys-in is for texts that no other text sees; leave out --workers and --paths"
        )
    if read_expert_set(checkpoint) is not None:
        refuse_beside_experts(checkpoint, {
            "--layout": spread.world > 1, "--draft": draft, "--prompts": prompts, "--keys-in": keys_in,
            "--workers": workers, "--paths": paths, "--cache-policy": cache_policy != "none",
            "--weights": weights != "float", "--layers-in": layers_in, "--neurons-in": neurons_in,
            "--experts-in": experts_in,
        })  # fmt: skip
    if system is not None and not chat:
        raise UsageError("--system is for --chat, whose template says where it belongs")
    if prompts is not None:
        from weft.memory.streamed_experts import StreamedExperts
        from weft.serve.whole_batch import PromptFile, write_prompt_file

        refused = {
            "--system": system, "--layout": spread.world > 1, "--draft": draft, "--think": think,
            "--texts, --beams, --workers and --paths": options.asked, "--cache-policy": cache_policy != "none",
            "--keys-in": keys_in,
            "--layers-in": layers_in, "--neurons-in": neurons_in,
        }  # fmt: skip
        for option, given in refused.items():
            if given:
                raise UsageError(
                    f"--prompts is for one text after each prompt, on one rank without drafts; leave out {option}"
                )
        stops = tuple(stop or ())
        folder = Path(experts_in) if experts_in and experts_in != "host" else None
        file = PromptFile(prompts, checkpoint, chat, tokens, how, stops, weights, ema, attention)  # fmt: skip
        streamed = StreamedExperts(folder, resident or 0.0) if experts_in else None
        write_prompt_file(file, device, streamed, warn, partial(print, flush=True))
        return 0
    if (code := launch_ranks(spread, checkpoint)) is not None:
        return code
    try:
        text = prompt if prompt_file is None else prompt_file.read_text()
    except OSError as error:
        raise UsageError(
            f"--prompt-file {prompt_file} cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--prompt-file {prompt_file} cannot be read: not text in UTF-8 (byte {error.start})"
        ) from None
    assert text is not None
    messages, tools = [{"role": "user", "content": text}], None
    if chat and prompt_file is not None and prompt_file.suffix == ".json":
        from weft.serve.messages import read_live

        talk, tools = read_messages(text)
        messages = read_live(talk)
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    if at_rest:
        at_rest.check_folders()
    with as_rank(spread, device) as device:
        resting = elsewhere.parts(weights)
        experts = open_experts(checkpoint, device, warn, ema)
        if experts:
            model, files = experts.models[0], experts.files
        else:
            model, files, _ = open_model(
                checkpoint,
                device,
                warn,
                ema,
                mesh_for(spread, device, checkpoint),
                lift_of(resting),
            )
        check_prompt(model, [0])
        read_only(model, weights)
        if device == "cpu":
            use_huge_pages()
        if not leads():
            follow_leader(model)
            return 0
        tell_about(resting, warn)
        tokenizer = tokenizer_of(files, checkpoint, warn)
        thoughts = verify = None
        if think or verifier:
            reasons = options.reasons if think else None
            ids, thoughts = reasoning_prompt(
                tokenizer, messages, reasons, checkpoint, tools
            )
        else:
            ids = prompt_ids(
                tokenizer, messages if chat else text, chat, checkpoint, tools
            )
        if verifier:
            judge, files, _ = open_model(verifier, device, warn)
            words = tokenizer_of(files, verifier, warn)
            verify = Verifier(judge, words, verifier, messages, tools)
        budget = CHUNK * spread.cp if spread.cp > 1 else BUDGET
        drafter = drafter_for(draft, model, warn, ahead, early_layer)
        with closing(
            engine_class(experts)(
                model,
                budget=budget,
                drafter=drafter,
                ranks=spread.world > 1,
                attention=attention,
                cache_policy=cache_policy_of(cache_policy),
                graphs=True,
            )
        ) as engine:
            engine.report_to(warn)
            rest = None
            if at_rest:
                together = max(options.number, beams)
                rest = rest_keys(engine, at_rest, together, len(ids) + tokens, warn)
            clock = [time.perf_counter()]
            if options.asked:
                _show(
                    options.write(
                        engine,
                        tokenizer,
                        ids,
                        tokens,
                        how,
                        stop or (),
                        thoughts,
                        verify,
                    )
                )
            else:
                fresh = _timed(
                    engine.stream(engine.submit(ids, tokens, how, tokenizer.stops)[0]),
                    clock,
                )
                if prompt and not chat:
                    _say(prompt)
                for piece in stream_text(tokenizer, fresh, stop or ()):
                    _say(piece)
                _say("\n")
            if rest is not None:
                print(f"weft: {rest.report()}", file=sys.stderr)
        if cache_policy != "none":
            print(f"weft: {engine.policy_usage()}", file=sys.stderr)
        if line := engine.travel_summary():
            print(f"weft: {line}", file=sys.stderr)
        if spread.world > 1 and len(clock) > 1:
            rate = (len(clock) - 2) / max(clock[-1] - clock[1], 1e-9)
            print(f"weft: {len(ids):,} tokens of prompt over {spread.world} ranks: first token after "
                  f"{clock[1] - clock[0]:.2f} s, then {rate:.1f} tokens/s", file=sys.stderr)  # fmt: skip
        for part in resting:
            print(f"weft: {part.report()}", file=sys.stderr)
    return 0


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _show(texts: Iterable[tuple[str, str]]) -> None:
    """Print texts, each below its heading."""
    console = plain_console()
    for heading, text in texts:
        console.rule(heading, style="dim", align="left")
        console.print(text, markup=False)
    console.rule(style="dim")


def _timed(ids: Iterator[int], clock: list[float]) -> Iterator[int]:
    """Yield ``ids``, and append the arrival time of each to ``clock``."""
    for i in ids:
        clock.append(time.perf_counter())
        yield i


def say_samples(checkpoint: "Where", recipe: "Recipe") -> list[dict[str, str]]:
    """Print the texts that a trained model writes for the prompts of ``recipe.generate``, and return prompts and texts.

    ``checkpoint``: where the trained model is. If the recipe asks for it, the texts of the model that training started
    from (``model.from``) are printed beside those of the trained model.
    """
    from weft.data.first_prompts import COUNT, first_prompts
    from weft.serve.text_requests import samples

    settings, origin = recipe.generate, recipe.model.origin
    assert settings is not None
    if settings.from_data:
        own = (
            prompt for source in recipe.data.sources for prompt in first_prompts(source)
        )
        if not (prompts := tuple(islice(own, COUNT))):
            warn(
                "the data has no short question; set generate.prompts to what the model is asked"
            )
            return []
        settings = settings.model_copy(update={"prompts": prompts})
    written = samples(checkpoint, settings, warn, recipe.optimizer.use_ema)
    shown_samples = [
        {"prompt": p, "text": t}
        for p, t in zip(settings.all_prompts, written, strict=True)
    ]
    if settings.before and origin is not None:
        for shown, before in zip(
            shown_samples, samples(origin, settings, warn), strict=True
        ):
            shown["before"] = before
        table = Table("asked", f"before, by {origin}", "after", show_lines=True)
        for shown in shown_samples:
            table.add_row(
                *(Text(shown[key].strip()) for key in ("prompt", "before", "text"))
            )
        Console(highlight=False).print(table)
        return shown_samples
    between = "\n" if settings.chat else ""
    _show(
        [
            ("the model writes", shown["prompt"] + between + shown["text"])
            for shown in shown_samples
        ]
    )
    return shown_samples
