"""Options of ``weft generate`` for several texts: several answers, beam search, a majority vote, and streams."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weft.data.chat.reasoning import Thoughts
from weft.data.tokenizer import Tokenizer
from weft.errors import UsageError, WeftError
from weft.generate.beam_search import LENGTH_PENALTY, Search, vote
from weft.generate.best_answer import RatedAnswer, answer_start, rated_answers
from weft.generate.engine import Engine
from weft.generate.joined_texts import Tags, hogwild, multiverse
from weft.generate.request import check_generations
from weft.generate.sampling import Sampling
from weft.layout.layout import Layout

#: The tokens by which a model parts its text, in the order of :class:`weft.generate.joined_texts.Tags`
#: (Yang et al. 2025).
TAGS = ("<Outline>", "</Goal>", "<Path>", "</Path>", "<Conclusion>")


#: The word of ``--think`` for answers without reasoning.
NO_REASONING = "none"


@dataclass(frozen=True)
class TextOptions:
    """The options of ``weft generate`` that ask for something other than one sampled text.

    Attributes:
        ``texts``: number of texts.
        ``beams``: number of beams; 0: no beam search.
        ``answer``: regular expression of the answer in a text, for a majority vote; None: no vote.
        ``workers``: number of texts that are written together and see each other (Hogwild); 0: none.
        ``paths``: whether the model forks its text (Multiverse).
        ``length_penalty``: exponent of the length penalty of beam search; None: the default.
        ``prune``: by how much a beam's score may be below the best one; 0: beams are not pruned.
        ``think``: value of ``--think``. A number such as "8" asks for so many texts, each with reasoning;
            :data:`NO_REASONING` asks for texts without reasoning. With "" the chat template decides.
        ``verifier``: name of the reward model that chooses an answer; "": none.
    """

    texts: int = 1
    beams: int = 0
    answer: str | None = None
    workers: int = 0
    paths: bool = False
    length_penalty: float | None = None
    prune: float = 0.0
    think: str = ""
    verifier: str = ""

    @property
    def asked(self) -> bool:
        """Whether any of these options differs from its default. ``--think`` with the value :data:`NO_REASONING` counts
        as a default.
        """
        return self not in (TextOptions(), TextOptions(think=NO_REASONING))

    @property
    def reasons(self) -> bool:
        """Whether ``--think`` asks for a number of texts that begin with reasoning."""
        return self.think not in ("", NO_REASONING)

    @property
    def number(self) -> int:
        """Number of texts that are sampled: the value of ``--think`` if it is a number, else ``texts``."""
        return int(self.think) if self.reasons else self.texts

    def check_choice(self, chat: bool) -> None:
        """Raise :class:`UsageError` if ``--think`` or ``--verifier`` does not fit the other options or the prompt.
        ``chat``: whether the prompt is a conversation.
        """
        if self.reasons and not (self.think.isdecimal() and int(self.think)):
            raise UsageError(
                f"--think {self.think} is no way to think; give {NO_REASONING}, or a number of texts such as 8"
            )
        for name, value in (("--think", self.think), ("--verifier", self.verifier)):
            if value and not chat:
                raise UsageError(
                    f"{name} is for --chat, whose template says where answers begin"
                )
            if value and (self.beams or self.workers or self.paths):
                raise UsageError(
                    f"{name} is for sampled texts; leave out --beams, --workers and --paths"
                )
        if self.reasons and self.texts > 1:
            raise UsageError(
                f"--think {self.think} writes {self.think} texts; leave out --texts"
            )
        if self.verifier and self.answer is not None:
            raise UsageError(
                "--verifier and --answer are different ways to choose; give one of them"
            )
        if self.verifier and self.number == 1:
            raise UsageError(
                "--verifier chooses among several answers; give --texts or --think, for instance 8"
            )

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
            if self.number == 1:
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
        if self.number > 1 and not self.beams and temperature == 0:
            raise UsageError(
                "with --temperature 0 all texts are the same; give another, or --beams for the likeliest"
            )
        if given and given != ["--answer"] and (draft or spread.world > 1):
            raise UsageError(
                f"{given[0]} is for one rank and without guesses; leave out --layout and --draft"
            )

    def write(
        self, engine: Engine, tokenizer: Tokenizer, ids: Sequence[int], count: int, how: Sampling,
        until: Sequence[str], thoughts: Thoughts | None = None, verify: Callable[[str], float] | None = None,
    ) -> Iterator[tuple[str, str]]:  # fmt: skip
        """Generate what these options ask for after the prompt ``ids``. Yield pairs: a heading, and a text that may be
        shown under it.

        ``count``: largest number of tokens of a text. ``how``: settings of sampling. ``until``: a text is cut before
        the first of these strings that it has. ``thoughts``: tags between which the model reasons; the reasoning is not
        counted as part of an answer. None: the model has no such tags. ``verify``: returns the score of an answer. It
        is used where the options choose the best of several answers; None: they choose by the model's own confidence.
        """

        def text_of(written: Sequence[int]) -> str:
            text = tokenizer.decode(written)
            return text[
                : min(
                    (text.find(stop) for stop in until if stop in text),
                    default=len(text),
                )
            ]

        def start_of(written: list[int]) -> int | None:
            return answer_start(tokenizer, written, thoughts)

        def words_of(written: list[int]) -> str | None:
            start = start_of(written)
            if not start:
                return None if start is None else text_of(written)
            return text_of(written[start:]).lstrip()

        def answer_of(written: list[int]) -> str | None:
            assert self.answer is not None
            words = words_of(written)
            if words is None:
                return None
            matches = list(_compiled(self.answer).finditer(words))
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
                engine, ids, count, how, self.number, answer_of, tokenizer.stops
            )
            yield (
                "answers",
                "\n".join(f"{n:>3} x {answer}" for answer, n in said.most_common())
                or "none",
            )
            yield "most say", "nothing that they ask for" if most is None else str(most)
        elif self.think or self.verifier:
            rated = rated_answers(
                engine, ids, count, how, self.number, tokenizer.stops, words_of, start_of, verify
            )  # fmt: skip
            yield from shown_choice(rated, "verifier" if verify else "confidence")
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
            check_generations(generations)
            for number, generation in enumerate(generations, 1):
                yield f"text {number} of {self.texts}", text_of(generation.written)


def shown_choice(rated: Sequence[RatedAnswer], judge: str) -> Iterator[tuple[str, str]]:
    """Yield two pairs of a heading and a text: first the scores of all answers, then the best answer.

    ``rated``: the answers with their scores. ``judge``: name of the scores for the heading. Raises :class:`WeftError`
    if no text has an answer.
    """
    scored = [(each.score, each) for each in rated if each.score is not None]
    if not scored:
        raise WeftError(
            f"none of the {len(rated)} texts came to an answer; give them more --tokens"
        )
    lines = [
        f"{each.number:>3}  {'no answer' if each.score is None else f'{each.score:.4f}'}"
        for each in rated
    ]
    yield f"{judge} of the answers", "\n".join(lines)
    _, best = max(scored, key=lambda pair: pair[0])
    yield f"answer {best.number} of {len(rated)}", best.text


def _compiled(answer: str) -> re.Pattern[str]:
    try:
        return re.compile(answer)
    except re.error as error:
        raise UsageError(
            f"--answer {answer!r} is no regular expression: {error}"
        ) from None


def tags_of(tokenizer: Tokenizer) -> Tags:
    """Return the tokens by which the model of ``tokenizer`` writes parts of its text as parallel paths (Multiverse).
    Raises :class:`UsageError` if the tokenizer lacks one of them.
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
