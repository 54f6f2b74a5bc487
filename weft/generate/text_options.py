"""Options of ``weft generate`` for several texts: several answers, beam search, a majority vote, and streams."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError
from weft.generate.beam_search import LENGTH_PENALTY, Search, vote
from weft.generate.engine import Engine
from weft.generate.joined_texts import Tags, hogwild, multiverse
from weft.generate.sampling import Sampling
from weft.layout.layout import Layout

#: The tokens by which a model parts its text, in the order of :class:`weft.generate.joined_texts.Tags`
#: (Yang et al. 2025).
TAGS = ("<Outline>", "</Goal>", "<Path>", "</Path>", "<Conclusion>")


@dataclass(frozen=True)
class TextOptions:
    """The options of ``weft generate`` that ask for something other than one sampled text.

    Attributes:
        ``texts``: number of texts.
        ``beams``: number of beams; 0: no beam search.
        ``answer``: regular expression of the answer in a text, for a majority vote; None: no vote.
        ``workers``: number of Hogwild's workers; 0: none.
        ``paths``: whether the model forks its text (Multiverse).
        ``length_penalty``: exponent of the length penalty of beam search; None: the default.
        ``prune``: by how much a beam's score may be below the best one; 0: beams are not pruned.
    """

    texts: int = 1
    beams: int = 0
    answer: str | None = None
    workers: int = 0
    paths: bool = False
    length_penalty: float | None = None
    prune: float = 0.0

    @property
    def asked(self) -> bool:
        """Whether any of these options is set."""
        return self != TextOptions()

    def check(self, temperature: float, draft: str, spread: Layout) -> None:
        """Raise :class:`UsageError` if these options conflict with each other or with the sampling ``temperature``, the
        option ``--draft`` (``draft``) or the layout ``spread``.
        """
        alone = {
            "--beams": self.beams,
            "--answer": self.answer,
            "--workers": self.workers,
            "--paths": self.paths,
        }
        given = [name for name, value in alone.items() if value]
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(given)} are different ways to write; give one of them"
            )
        if self.answer is not None:
            _compiled(self.answer)
            if self.texts == 1:
                raise UsageError(
                    "--answer is what most of several texts say; give --texts, for instance 8"
                )
        if self.texts > 1 and (self.workers or self.paths):
            raise UsageError(
                f"{given[0]} writes its own number of texts; leave out --texts"
            )
        if self.beams and self.texts > self.beams:
            raise UsageError(
                f"--beams {self.beams} finds {self.beams} texts, and --texts asks for {self.texts}"
            )
        if not self.beams and (self.prune or self.length_penalty is not None):
            name = "--prune" if self.prune else "--length-penalty"
            raise UsageError(
                f"{name} is about beam search; give --beams, or leave it out"
            )
        if self.texts > 1 and not self.beams and temperature == 0:
            raise UsageError(
                "with --temperature 0 all texts are the same; give another, or --beams for the likeliest"
            )
        if given and given != ["--answer"] and (draft or spread.world > 1):
            raise UsageError(
                f"{given[0]} is for one rank and without guesses; leave out --layout and --draft"
            )

    def write(
        self, engine: Engine, tokenizer: Tokenizer, ids: Sequence[int], count: int, how: Sampling,
        until: Sequence[str],
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        """Generate what these options ask for after the prompt ``ids``. Yield pairs of a heading and a text of up to
        ``count`` tokens, which is cut at the first of the strings ``until``. ``how``: settings of sampling.
        """

        def text_of(written: Sequence[int]) -> str:
            text = tokenizer.decode(written)
            return text[
                : min(
                    (text.find(stop) for stop in until if stop in text),
                    default=len(text),
                )
            ]

        def answer_of(written: list[int]) -> str | None:
            assert self.answer is not None
            matches = list(_compiled(self.answer).finditer(text_of(written)))
            return (
                None if not matches else matches[-1][1 if matches[-1].re.groups else 0]
            )

        if self.beams:
            alpha = (
                LENGTH_PENALTY if self.length_penalty is None else self.length_penalty
            )
            search = Search(
                engine,
                ids,
                count,
                self.beams,
                tokenizer.stops,
                alpha,
                self.prune or math.inf,
            )
            best = search.run()[: self.texts]
            yield from (
                (
                    f"log-probability {generation.log_probability:.2f}",
                    text_of(generation.ids),
                )
                for generation in best
            )
        elif self.answer is not None:
            most, said = vote(
                engine, ids, count, how, self.texts, answer_of, tokenizer.stops
            )
            yield (
                "answers",
                "\n".join(f"{n:>3} x {answer}" for answer, n in said.most_common())
                or "none",
            )
            yield "most say", "nothing that they ask for" if most is None else str(most)
        elif self.workers:
            names = [f"worker {i}" for i in range(1, self.workers + 1)]
            openings = [
                [int(i) for i in tokenizer.encode(f"\n\n{name}:")] for name in names
            ]
            generations = hogwild(engine, ids, openings, count, how, tokenizer.stops)
            yield from zip(
                names,
                (text_of(generation.written) for generation in generations),
                strict=True,
            )
        elif self.paths:
            whole = multiverse(
                engine, ids, tags_of(tokenizer), count, how, tokenizer.stops
            )
            pieces = [view.request.ids[: view.tokens] for view in whole.seen]
            pieces[0] = pieces[0][len(ids) :]
            yield f"{len(pieces)} pieces", "\n".join(text_of(piece) for piece in pieces)
        else:
            generations = engine.submit(ids, count, how, tokenizer.stops, self.texts)
            engine.run()
            for number, generation in enumerate(generations, 1):
                yield f"text {number} of {self.texts}", text_of(generation.written)


def _compiled(answer: str) -> re.Pattern[str]:
    try:
        return re.compile(answer)
    except re.error as error:
        raise UsageError(
            f"--answer {answer!r} is no regular expression: {error}"
        ) from None


def tags_of(tokenizer: Tokenizer) -> Tags:
    """Return the tokens by which the model of ``tokenizer`` marks how its text forks. Raises :class:`UsageError` if the
    tokenizer lacks one.
    """
    tags = {
        tag: None if tokenizer.model is None else tokenizer.model.token_to_id(tag)
        for tag in TAGS
    }
    if lacking := [tag for tag, i in tags.items() if i is None]:
        raise UsageError(
            f"the tokenizer has no {', '.join(lacking)}, by which a model says where its text parts; leave out --paths"
        )
    return Tags(*(i for i in tags.values() if i is not None))
