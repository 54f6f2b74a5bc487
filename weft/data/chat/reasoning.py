"""Separates a thinking model's text into its reasoning and its answer, as the text comes."""

from typing import NamedTuple

#: What templates write around reasoning.
TAGS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


#: The template variable that says whether answers begin with reasoning.
THINKS = "enable_thinking"


class Thoughts(NamedTuple):
    """The tags that stand before and after the reasoning in an answer, such as ``<think>`` and ``</think>``.

    ``opening``: the tag before the reasoning; ``closing``: the tag after it. ``begun``: whether the prompt ends with
    the tag ``opening``, so that the answer begins inside its reasoning.
    """

    opening: str
    closing: str
    begun: bool = False


def thoughts_of(template: str) -> Thoughts | None:
    """Return the reasoning tags of a chat template; None if the template has none."""
    return next((Thoughts(*tags) for tags in TAGS if tags[1] in template), None)


def begins_thinking(thoughts: Thoughts, prompt: str, continued: str = "") -> bool:
    """Return whether an answer after ``prompt`` begins inside its reasoning.

    ``thoughts``: the tags of reasoning. ``continued``: the beginning of the answer, if the prompt already contains it
    at its end.
    """
    if continued:
        return continued.rfind(thoughts.opening) > continued.rfind(thoughts.closing)
    return prompt.rstrip().endswith(thoughts.opening)


def without_reasoning(thoughts: Thoughts, template: str, prompt: str) -> str:
    """Return ``prompt`` with a closed, empty block of reasoning at its end, so that the answer begins at once.

    ``thoughts``: the tags of reasoning. ``template``: text of the chat template that has written ``prompt``, with the
    variable ``enable_thinking`` set to false. In two cases the prompt is returned unchanged: if it already ends with a
    closed block, or if it has no opened block and the template reads ``enable_thinking``. In the second case the
    template itself has asked for an answer without reasoning.
    """
    begun = begins_thinking(thoughts, prompt)
    closed = prompt.rstrip().endswith(thoughts.closing)
    if closed or (THINKS in template and not begun):
        return prompt
    opened = prompt if begun else prompt + thoughts.opening
    return f"{opened.rstrip()}\n\n{thoughts.closing}\n\n"


class ReasoningFinder:
    """Separates the reasoning at the beginning of an answer from the rest, as the answer's text comes in pieces.

    ``thoughts``: the tags around the reasoning.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self.thoughts, self.inside, self.over = thoughts, thoughts.begun, False
        self._kept = ""  # what may belong to a tag, or is white space around one
        # whether any of the reasoning, or of the answer behind it, was given out
        self._shown = False

    def add(self, piece: str) -> tuple[str, str]:
        """Add ``piece``, and return the new text that is certain, as a pair ``(reasoning, answer)``.

        Each element is new text that certainly belongs to the reasoning, or to the answer. Text that may begin a tag is
        held back.
        """
        self._kept += piece
        if not self.inside and not self.over:
            self._begin()
        thought = self._think() if self.inside else ""
        return thought, self._release(len(self._kept)) if self.over else ""

    def end(self) -> tuple[str, str]:
        """End the text, and return the text that was held back, as a pair ``(reasoning, answer)``."""
        rest, self._kept = self._kept, ""
        return (rest.rstrip(), "") if self.inside else ("", rest)

    def _begin(self) -> None:
        """Decide whether the text begins with reasoning, if that is certain yet."""
        opening, text = self.thoughts.opening, self._kept.lstrip()
        if text.startswith(opening):
            self.inside, self._kept = True, text.removeprefix(opening)
        elif not opening.startswith(text):
            # an answer without reasoning keeps its white space
            self.over = self._shown = True

    def _think(self) -> str:
        closing, text = self.thoughts.closing, self._kept
        at = text.find(closing)
        if at >= 0:
            self._kept = text[at + len(closing) :]
            self.inside, self.over = False, True
            thought = text[:at].rstrip()
            thought = thought if self._shown else thought.lstrip()
            self._shown = False
            return thought
        begun = max(
            (n for n in range(1, len(closing)) if text.endswith(closing[:n])), default=0
        )
        return self._release(len(text[: len(text) - begun].rstrip()))

    def _release(self, count: int) -> str:
        """Return the first ``count`` characters held back, without white space at the beginning of what is shown."""
        text, self._kept = self._kept[:count], self._kept[count:]
        text = text if self._shown else text.lstrip()
        self._shown = self._shown or bool(text)
        return text
