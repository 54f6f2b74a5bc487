"""The option ``--cache-policy`` of the commands that hold an engine."""

from typing import Annotated

import typer

_cache_policy = (
    "Which cached tokens new ones attend to. none: all. window:TOKENS: the first ones and "
    "the last TOKENS; others leave the cache. blocks:SHARE: the share of the blocks whose "
    "mean keys fit best; less is read. alisa:SHARE: the last ones and those with most "
    "attention so far, together SHARE, behind a prompt that is read whole (:prompts: in it, too; "
    ":query: those that the present queries fit, by some of their elements, and some drawn from "
    "all others; :drawn: more of these); blocks that do not fit move to the host "
    "(:host=TOKENS of room; :int8: in 8 bits). "
    "A share of 1, or a window over all, is exact."
)
CachePolicyWord = Annotated[
    str,
    typer.Option(
        "--cache-policy",
        metavar="none|window:TOKENS|blocks:SHARE|alisa:SHARE",
        help=_cache_policy,
    ),
]
