"""Chat template and encoder that a recipe's section ``data.chat`` asks for."""

from datetime import datetime

from weft.data.chat.chat_template import ChatTemplate, template_of, template_text
from weft.data.chat.encode import ChatEncoder
from weft.data.tokenizer import Tokenizer
from weft.errors import WeftError
from weft.recipe import Chat


def recipe_template(
    settings: Chat, tokenizer: Tokenizer, now: datetime | None = None
) -> ChatTemplate:
    """Return the chat template that the recipe's ``settings`` name, or by default that of the tokenizer.

    ``now``: date and time that the template takes for the present ones; None: the date of ``settings``, else the real
    ones. Raises :class:`WeftError` if there is no template.
    """
    if now is None and settings.date:
        now = datetime.strptime(settings.date, "%Y-%m-%d")
    now = now or datetime.now()
    # dates are texts, as they are for ranks and for processes that encode, which get the settings as JSON
    variables = settings.model_dump(mode="json")["variables"]
    if given := settings.template:
        text = template_text(given, "data.chat.template")
        return ChatTemplate(text, tokenizer, variables, now, settings.control)
    template = template_of(tokenizer, variables, now, settings.control)
    if template is None:
        raise WeftError(
            "the tokenizer has no chat template; set data.chat.template to a file with one, or use its own"
        )
    return template


def chat_encoder(settings: Chat, template: ChatTemplate) -> ChatEncoder:
    """Return an encoder of conversations with ``template`` and the recipe's section ``data.chat``."""
    return ChatEncoder(template, settings.learn, settings.reasoning)
