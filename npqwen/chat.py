"""A conversation as one text, by the checkpoint's own chat template, and that text as ids that nobody can forge.

A template is a Jinja program that came with the weights, so it runs in Jinja's sandbox. It is never applied unless
asked: completion is tokenizer.encode, which adds nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from npqwen.errors import UserError
from npqwen.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]


def render(
    messages: Messages,
    *,
    template: str,
    thinking: bool = True,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
    tokens: Mapping[str, str] | None = None,
) -> str:
    """The template's text. `thinking` reaches it as enable_thinking; `tokens` are names such as eos_token it may use.

    Jinja is set up as transformers.utils.chat_template_utils does it: blocks trimmed and stripped to the left, tojson
    that escapes neither HTML nor non-ASCII characters, raise_exception, strftime_now.
    """
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UserError("chat templates need the jinja2 package: pip install 'npqwen[chat]'") from None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    _check(messages)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda layout: datetime.now().strftime(layout),
    }
    try:
        return environment.from_string(template).render(
            **(tokens or {}),
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinking,
        )
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"chat template, line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise UserError(f"chat template: {error.message}") from None
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:  # of the template's own making
        raise UserError(f"chat template: {type(error).__name__}: {error}") from None


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    thinking: bool = True,
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Ids of the rendered conversation. Control tokens come from the template alone.

    A control token spelled out in a message or a tool is encoded as the plain characters it is. An assistant's own
    earlier answers may hold tokens that are not marked special (<think>, <tool_call>): the model wrote those. What a
    tool returned belongs into a message of the role "tool".
    Raises UserError if the checkpoint has no template.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "the checkpoint has no chat template (looked for chat_template.jinja, and chat_template in "
            "tokenizer_config.json); complete plain text instead"
        )
    _check(messages)
    mark = _unused_character(json.dumps([list(messages), tools], ensure_ascii=False, default=str))
    added = list(tokenizer.added.values())
    special = [tokenizer.added[i] for i in tokenizer.special_ids]
    names = {token: f"{mark}{i}{mark}" for i, token in enumerate(added)}

    def guard(value: Any, tokens: list[str]) -> Any:
        """The value with a name in place of every token that one of its texts spells out."""
        if isinstance(value, str):
            return re.sub(_any_of(tokens), lambda found: names[found[0]], value) if tokens else value
        if isinstance(value, Mapping):
            return {key: guard(v, tokens) for key, v in value.items()}
        return [guard(v, tokens) for v in value] if isinstance(value, list | tuple) else value

    text = render(
        [guard(m, special if m.get("role") == "assistant" else added) for m in messages],
        template=tokenizer.chat_template,
        thinking=thinking,
        tools=None if tools is None else guard(tools, added),
        add_generation_prompt=add_generation_prompt,
        tokens={name: tokenizer.token(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
    )
    id_of = {token: i for i, token in tokenizer.added.items()}
    token_of = {name: token for token, name in names.items()}
    ids: list[int] = []
    plain = ""
    for piece in re.split(f"({_any_of([*names.values(), *added])})", text) if added else [text]:
        if piece in id_of:
            ids += [*tokenizer.encode_plain(plain), id_of[piece]]
            plain = ""
        else:
            plain += token_of.get(piece, piece)
    return ids + tokenizer.encode_plain(plain)


def split_thinking(
    tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()
) -> tuple[list[int], list[int], bool]:
    """(reasoning, answer, whether the reasoning was closed), split at the token </think>; a text that spells it is none.

    The opening <think> may be the model's or the prompt's. Reasoning that the cap cut has no answer, and is kept.
    """
    id_of = {token: i for i, token in tokenizer.added.items()}
    opening, closing = id_of.get("<think>"), id_of.get("</think>")
    ids = list(ids)
    if closing is not None and closing in ids:
        at = ids.index(closing)
        return [i for i in ids[:at] if i != opening], ids[at + 1 :], True
    last = next((i for i in reversed(list(prompt)) if i in (opening, closing)), None)
    if opening is not None and (opening in ids or last == opening):
        return [i for i in ids if i != opening], [], False
    return [], ids, True


def _check(messages: Messages) -> None:
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UserError(f'a message is {message!r}; {{"role": "user", "content": "..."}} is needed')


def _any_of(tokens: list[str]) -> str:
    """A pattern for any of the tokens, the longest where several begin at one place, as tokenizers do."""
    return "|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True))


def _unused_character(text: str) -> str:
    """One of Unicode's noncharacters, which no text should hold, that this text does not hold."""
    return next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in text)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
