"""From a recipe with ``[rl]`` to a job whose samples are answers of its own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weft.cache import digest
from weft.data.bos import with_bos
from weft.data.chat.encode import own_encoder
from weft.data.loader import Corpus
from weft.data.order import Order
from weft.data.tokenizer import load_tokenizer
from weft.errors import UsageError
from weft.recipe.conflicts import AskedRecipe
from weft.recipe.masked import masked_values
from weft.refusal import refuse
from weft.registry import find
from weft.rl.build_task import reward_task
from weft.rl.questions import QuestionStream
from weft.rl.rl_checks import check_rl
from weft.rl.rl_job import RlJob
from weft.train.setup import completed_job

if TYPE_CHECKING:
    from weft.data.tokenizer import Tokenizer
    from weft.recipe import Recipe

#: Settings that change none of the samples, or are younger than runs that may be resumed.
_APART: Any = {
    "keep": True,
    "share_prompts": True,
    "known_products": True,
    "loss": {"vespo_positive", "vespo_negative"},
}


def prepare_rl(recipe: Recipe) -> RlJob:
    """Prepare a recipe of reinforcement learning: complete the model's shape, open the tasks, and check all settings.

    Raises :class:`UsageError` or :class:`weft.errors.WeftError` if a setting or a task is wrong.
    """
    job = completed_job(recipe, lambda own: _corpus(recipe, own), RlJob)
    # a pretrained model may have small feed-forwards, or an adapter with dropout
    begun = AskedRecipe(
        rl=recipe.rl, roles=recipe.roles, model=job.shape, adapter=job.shape.adapter
    )
    refuse(begun, find("samples", "rl").rules)
    rewarded = tuple(task for task in recipe.tasks if task.reward)
    tokenizer = job.corpus.tokenizer
    chats = any(task.chat for task in rewarded)
    encoder = (
        own_encoder(tokenizer, recipe.model.origin or "the tokenizer", "last")
        if chats
        else None
    )
    tasks = [reward_task(task, recipe.train.seed) for task in rewarded]
    questions = QuestionStream(
        tasks, tokenizer, encoder, recipe.train.seed, recipe.data.seq_len
    )
    job = job.with_questions(rewarded, questions)
    check_rl(job)
    questions.check(job.supervised > 0, job.rl.tokens)
    return job


def _corpus(recipe: Recipe, own: Tokenizer | None) -> Corpus:
    """Return a corpus without documents, with the run's tokenizer."""
    data = recipe.data
    if data.tokenizer.startswith("train:"):
        raise UsageError(
            f"data.tokenizer = {data.tokenizer!r} is trained on documents, and a run with [rl] reads none; name a "
            "tokenizer, or leave it out for bytes"
        )
    tokenizer = (
        own
        if own and not data.tokenizer
        else load_tokenizer(data.tokenizer, (), data.cache)
    )
    tokenizer = with_bos(tokenizer, data.bos)
    tasks = [task.model_dump(mode="json") for task in recipe.tasks if task.reward]
    # a renewed password or signature changes no sample
    identity = digest(
        masked_values(tasks),
        tokenizer.fingerprint,
        recipe.train.seed,
        recipe.rl and masked_values(recipe.rl.model_dump(mode="json", exclude=_APART)),
    )
    said = ", ".join(str(task["reward"]) for task in tasks)
    return Corpus(
        tokenizer, Order((), (), 0), None, f"answers to questions of {said}", identity
    )
