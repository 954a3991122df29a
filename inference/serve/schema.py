"""Requests as defined by OpenAI's API; unsupported fields are rejected."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.serve.http import ApiError
from pipeline.data.chat.resolve_format import Argument
from pipeline.data.examples import Message

T = TypeVar("T", bound=BaseModel)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(max_length=256)]
TYPE_SUFFIXES = ("str", "int", "float", "bool")
"""Type names that pydantic appends to the name of a field with several types."""

MAX_STOPS = 16
SEED_LIMIT = 2**63
"""Seeds are signed 64-bit integers."""

UNSUPPORTED = (
    *("tools", "functions", "tool_choice", "function_call", "response_format", "regex"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("audio", "modalities", "prediction", "web_search_options", "chat_template", "suffix"),
    *("chat_template_kwargs", "reasoning_effort", "service_tier", "store", "use_beam_search"),
    *("allowed_token_ids", "bad_words", "ignore_eos", "prompt_logprobs", "stop_token_ids"),
)
"""Fields of OpenAI's and vLLM's APIs that are rejected."""

NEUTRAL_VALUES = (None, "", False, [], {}, "none", "auto", "default", ["text"], {"type": "text"})
"""Values of the fields in `UNSUPPORTED` that have no effect and are accepted."""

EXPORTS = "for tools and structured output, serve the exported model with vLLM or SGLang"

REASONS = {
    "chat_template": "only the model's own template is used, since templates are programs",
    **dict.fromkeys(UNSUPPORTED[:11], EXPORTS),
}


class StrictModel(BaseModel):
    """A model that does not coerce types."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class ContentPart(BaseModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a dialogue."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    tool_calls: object = None
    function_call: object = None

    @model_validator(mode="after")
    def check(self) -> "ChatMessage":
        """Reject tool calls."""
        if self.tool_calls or self.function_call:
            raise ValueError(f"tool calls are not supported; {EXPORTS}")
        return self

    @property
    def message(self) -> Message:
        """The message in the pipeline's format."""
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return Message("system" if self.role == "developer" else self.role, text)


class TemplateFields(BaseModel):
    """Fields that control how a dialogue is rendered as a prompt."""

    chat_template_kwargs: Annotated[dict[str, Argument], Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None

    @property
    def adds_prompt(self) -> bool:
        """Whether the generation prompt is added after a user turn."""
        return self.add_generation_prompt is not False


class StreamOptions(BaseModel):
    """Options of a stream."""

    include_usage: bool = False


class SamplingFields(StrictModel):
    """OpenAI's sampling fields, followed by extensions."""

    model: str = Field(default="", max_length=512)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = Field(default=None, ge=-SEED_LIMIT, lt=SEED_LIMIT)
    max_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Bias] | None = Field(default=None, max_length=1024)
    user: str | None = None

    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings; a response ends before the first one."""
        return tuple(filter(None, [self.stop] if isinstance(self.stop, str) else self.stop or []))

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields, TemplateFields):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=1024)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def check(self) -> "ChatRequest":
        """Reject a request to both begin and continue a response."""
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError(
                "continue_final_message and add_generation_prompt are mutually exclusive"
            )
        return self

    @property
    def num_top(self) -> int | None:
        """Number of top tokens reported per token; None if no log-probabilities are requested."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(max_length=2**21)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = Field(default=None, ge=1)

    @property
    def prompts(self) -> "list[str | list[int]]":
        """One or more prompts, each text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt and isinstance(prompt[0], int):
            return [list(prompt)]  # all are integers, by the schema
        return list(prompt)  # pyrefly: ignore[bad-return]


class TokenizeRequest(StrictModel, TemplateFields):
    """`POST /tokenize`: a text or a dialogue."""

    model: str = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=1024)
    add_special_tokens: bool = True


class ScoreRequest(StrictModel):
    """`POST /v1/score`: a dialogue that ends with the response to score."""

    model: str = ""
    messages: list[ChatMessage] = Field(min_length=2, max_length=1024)


class RatedMessage(StrictModel, extra="forbid"):
    """A turn of the dialogue before a rated response."""

    role: Literal["system", "user", "assistant"]
    content: str


class RatedAnswer(StrictModel, extra="forbid"):
    """A rated response and where it came from."""

    model: str = Field(max_length=512)
    weights_hash: str | None = Field(default=None, max_length=64)
    text: str = Field(max_length=2**20)
    token_ids: list[TokenId] = []
    seed: int | None = None
    sampling: dict[str, float | int | str | None] = {}
    finish: str | None = Field(default=None, max_length=32)
    score: float | None = None


class RatingRequest(StrictModel, extra="forbid"):
    """`POST /api/ratings`; docs/rating.md lists the fields."""

    kind: Literal["pair", "thumb", "edit"]
    rater: str = Field(default="", max_length=64)
    messages: list[RatedMessage] = Field(min_length=1, max_length=1024)
    answers: list[RatedAnswer] = Field(min_length=1, max_length=2)
    choice: Literal[0, 1] | None = None
    strength: Literal[1, 2, 3] | None = None
    tie: bool = False
    edit: str | None = Field(default=None, min_length=1, max_length=2**20)
    reason: str = Field(default="", max_length=256)
    comment: str = Field(default="", max_length=4096)
    shown: list[Literal[0, 1]] | None = None
    blind: bool = False
    seconds: float | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def check(self) -> "RatingRequest":
        """Check the fields of each kind of rating."""
        if self.messages[-1].role != "user":
            raise ValueError("messages must end with a user turn")
        if len(self.answers) != (2 if self.kind == "pair" else 1):
            raise ValueError("a pair needs two answers; a thumb or an edit needs one")
        if (self.kind == "thumb" and self.choice is None) or (self.tie and self.choice is not None):
            raise ValueError("a thumb needs a choice; a tie must not have one")
        if (self.kind == "edit") != (self.edit is not None):
            raise ValueError('an edit needs the field "edit"; other kinds must not have it')
        return self


class UndoRequest(StrictModel):
    """`POST /api/ratings/undo`."""

    id: str = Field(max_length=64)
    rater: str = Field(default="", max_length=64)


def read_request(kind: type[T], body: Mapping[str, Any]) -> tuple[T, str]:
    """Validate a request; return it and the names of ignored fields, for a header.

    Raises:
        ApiError: a field is missing, invalid or unsupported.
    """
    for name in UNSUPPORTED:
        if name not in kind.model_fields and body.get(name) not in NEUTRAL_VALUES:
            reason = REASONS.get(name, "omit it")
            raise ApiError(400, f"{name} is not supported; {reason}", param=name)
    try:
        request = kind.model_validate(dict(body))
    except ValidationError as error:
        raise _to_api_error(error) from None
    ignored = [
        re.sub(r"[^\w.-]", "?", name[:64], flags=re.ASCII)
        for name, value in body.items()
        if name not in kind.model_fields and name not in UNSUPPORTED and value is not None
    ]
    return request, ", ".join(ignored[:16])


def _to_api_error(error: ValidationError) -> ApiError:
    """Return the first error, as a sentence that begins with the field's name.

    If the field may have several types, the error of a type that the value has is preferred.
    """
    errors = error.errors(include_url=False, include_input=False, include_context=False)
    field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    first = min(field, key=lambda item: item["type"].endswith("_type"))
    path = [p for p in first["loc"] if re.fullmatch(r"\w+", str(p)) and p not in TYPE_SUFFIXES]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    name = name.lstrip(".")[:100] or "body"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:200]
    param = str(first["loc"][0])[:64] if first["loc"] else None
    return ApiError(400, f"{name}: {message}", param=param)
