"""Proposals of policies by a language model behind an OpenAI-compatible interface.

A model's answer is read by :mod:`weft.search.policy_language` and never run as Python, so that it can do nothing but
calculate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from weft.errors import UsageError, WeftError
from weft.search.evolution import JudgedExpression
from weft.search.judged_policy import JudgedPolicy
from weft.search.policy_language import Expression, parse_policy

if TYPE_CHECKING:
    from weft.serve.api_client import ApiClient

#: A block of code in Markdown.
BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
#: Most tokens of an answer.
TOKENS = 800


class ModelProposals:
    """Asks a language model for better policies. A call takes the best expressions so far, asks ``each`` times, and
    returns the proposed expressions that could be read.

    ``policy``: the kind of policy with its simulator. ``client``: client of the OpenAI-compatible server. ``model``:
    the model's name there. ``say``: called with a line about answers that cannot be
    read, the first of each generation. The attribute ``refused`` counts such answers.
    """

    def __init__(
        self,
        policy: JudgedPolicy,
        client: ApiClient,
        model: str,
        each: int,
        say: Callable[[str], None],
    ) -> None:
        self.policy, self.client, self.model = policy, client, model
        self.each, self.say, self.refused = each, say, 0

    def __call__(self, best: Sequence[JudgedExpression]) -> list[Expression]:
        """Return the expressions that the model proposes, given the best so far. What cannot be read is left out."""
        proposals, refusals = list[Expression](), list[str]()
        for _ in range(self.each):
            try:
                answer = self._ask(best)
                blocks = BLOCK.findall(answer)
                source = blocks[-1] if blocks else answer
                proposals.append(parse_policy(source, [*self.policy.features]))
            except UsageError as error:
                refusals.append(str(error))
            except WeftError as error:
                self.say(f"{error}; the search goes on without it")
                break
        self.refused += len(refusals)
        if refusals:
            self.say(
                f"{len(refusals)} of {self.each} answers of {self.model} are no policies; the first: {refusals[0]}"
            )
        return proposals

    def _ask(self, best: Sequence[JudgedExpression]) -> str:
        body = {
            "model": self.model,
            "max_tokens": TOKENS,
            "temperature": 1.0,
            "messages": [{"role": "user", "content": self._prompt(best)}],
        }
        reply = self.client.call("/chat/completions", body)
        try:
            return str(reply["choices"][0]["message"]["content"] or "")
        except (KeyError, IndexError, TypeError):
            raise WeftError(
                f"{self.client.url} answers without choices; give the address of an OpenAI-compatible server"
            ) from None

    def _prompt(self, best: Sequence[JudgedExpression]) -> str:
        known = "\n".join(f"{each.cost:.6g}: {each.expression}" for each in best)
        features = "\n".join(
            f"{name}: {what}" for name, what in self.policy.features.items()
        )
        return (
            f"A policy computes a number for every choice; that with the smallest number is made. "
            f"A simulator judges it in {self.policy.unit}; less is better.\n\n"
            f"Names that a policy may use:\n{features}\n\n"
            f"The best policies so far, with their costs:\n{known}\n\n"
            "Write a better one as a Python function without loops, imports and attributes, whose arguments are names "
            "from the list. It may use + - * /, comparisons, if, min, max, abs, sqrt and log1p. Answer with one block "
            "of code."
        )
