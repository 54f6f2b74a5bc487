"""A model of Weft's for EleutherAI's lm-eval (pip install 'weft[eval]'), under the name ``weft``.

``python -m weft.serve.harness --model weft --model_args pretrained=runs/mine --tasks hellaswag`` is ``lm_eval`` with
this model known; ``pretrained`` is whatever ``model.from`` can name. From Python, import this file and give
``simple_evaluate`` an instance, or the name.
"""

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from weft.checkpoint.model import open_model, tokenizer_of
from weft.data.chat.chat_template import template_of
from weft.data.tasks import Text
from weft.errors import UsageError, WeftError
from weft.generate.engine import Engine
from weft.generate.sampling import Sampling
from weft.serve.text_requests import TextRequest, write_texts
from weft.train.score import scores

#: A request of log-likelihood: its texts, and the ids of both.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("weft")
class WeftLM(TemplateLM):
    """A model for EleutherAI's evaluation harness.

    Args:
        ``pretrained``: a run, a checkpoint, a Hugging Face folder, a GGUF file or an id of the hub.
        ``batch_size``: number of texts that are scored or written together; they are packed into rows without padding.
        ``max_batch_size``: has no effect; the harness passes it to every model.
        ``device``: device on which the model is computed; None: the GPU if there is one.
        ``max_length``: largest number of tokens that the model reads.
        ``max_gen_toks``: largest number of tokens that it writes, if a task sets none.
        ``ema``: whether the moving averages of the model's parameters are used in their place.
    """

    def __init__(
        self, pretrained: str, batch_size: int | str = 64, max_batch_size: int | None = None,
        device: str | None = None, max_length: int = 2048, max_gen_toks: int = 256, ema: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.model, files, _ = open_model(
            pretrained, where, logging.getLogger("weft").warning, ema
        )
        self.name, self.max_length, self.max_gen_toks = (
            str(pretrained),
            max_length,
            max_gen_toks,
        )
        self.own = self.tokenizer = tokenizer_of(
            files, pretrained, logging.getLogger("weft").warning
        )
        # "auto" is no question here
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 64
        self._device = self.model.mesh.device

    @property
    def eot_token_id(self) -> int:
        return self.own.closing

    @property
    def prefix_token_id(self) -> int:
        return self.own.closing if self.own.bos is None else self.own.bos

    @property
    def tokenizer_name(self) -> str:
        return f"{self.name.replace('/', '__')}-{self.own.fingerprint}"

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of the text ``string``. Names of special tokens in the text become these tokens, as chat
        templates need. ``add_special_tokens``: has no effect.
        """
        ids = [int(i) for i in self.own.encode(string, special=True)]
        opening = self.own.opening if add_special_tokens is not False else []
        return ids if ids[: len(opening)] == opening else opening + ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        template = template_of(self.own)
        if template is None:
            raise WeftError(
                f"{self.name} has no chat template; leave out --apply_chat_template"
            )
        text = template.render(chat_history, None, prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        said = chat_history[-1]["content"].rstrip()  # which the model is to go on with
        return text[: text.rindex(said) + len(said)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for start in tqdm(
            range(0, len(requests), self.batch_size),
            disable=disable_tqdm,
            desc="log-likelihoods",
        ):
            some = requests[start : start + self.batch_size]
            fresh = [
                tuple(s)
                for s in scores(
                    self.model,
                    None,
                    self.model.mesh,
                    [self._text(*r[1:]) for r in some],
                )
            ]
            for (asked, _, _), answer in zip(some, fresh, strict=True):
                if asked is not None:
                    self.cache_hook.add_partial("loglikelihood", asked, answer)
            results += fresh  # type: ignore[arg-type]
        return results

    def _text(self, context: list[int], continuation: list[int]) -> Text:
        """Return the text to score, without the beginning of a context that is too long."""
        if not 0 < len(continuation) <= self.max_length:
            raise WeftError(
                f"a continuation has {len(continuation)} tokens, and max_length is {self.max_length}"
            )
        kept = self.max_length + 1 - len(continuation)
        return Text(context[-kept:], continuation)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        windows = []
        for (text,) in (request.args for request in requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, 1
            )
            windows.append(
                [(None, *utils.make_disjoint_window(window)) for window in rolling]
            )
        each = self._loglikelihood_tokens(
            [pair for pairs in windows for pair in pairs], disable_tqdm
        )
        ends = list(accumulate(map(len, windows), initial=0))
        totals = [sum(p for p, _ in each[a:b]) for a, b in pairwise(ends)]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[str]:
        asks = [
            self._asked(text, normalize_gen_kwargs(how, self.max_gen_toks))
            for text, how in (r.args for r in requests)
        ]
        with tqdm(total=len(asks), disable=disable_tqdm, desc="generating") as bar:
            texts = write_texts(
                Engine(self.model, limit=self.batch_size, graphs=True),
                self.own,
                asks,
                bar.update,
            )
        answers = [
            str(postprocess_generated_text(text, list(a.until), None))
            for a, text in zip(asks, texts, strict=True)
        ]
        for request, text in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return answers

    def _asked(self, context: str, settings: dict[str, Any]) -> TextRequest:
        """Return the request for a text after ``context``, up to a stop sequence."""
        until, most = settings.pop("until", []), settings.pop("max_gen_toks")
        until = [until] if isinstance(until, str) else [term for term in until if term]
        sampled, temperature = (
            settings.pop("do_sample", False),
            settings.pop("temperature", 1.0),
        )
        top_k = settings.pop("top_k", None) or 0
        if unknown := sorted(
            key for key, value in settings.items() if value not in (None, 1.0)
        ):
            raise UsageError(
                f"generation has no setting {unknown[0]!r} here; leave it out of gen_kwargs"
            )
        if most >= self.max_length:
            raise UsageError(
                f"max_length = {self.max_length} leaves no room for a prompt before {most} new tokens"
            )
        ids = self.tok_encode(context)[most - self.max_length :]
        stops = {
            *self.own.stops,
            *(self.own.specials[term] for term in until if term in self.own.specials),
        }
        return TextRequest(
            ids, most, Sampling(temperature * bool(sampled), top_k), stops, until
        )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
