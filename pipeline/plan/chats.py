"""The tokenizer and chat format of every model of a plan, those that steps have yet to make too.

A model that an earlier step makes has the tokenizer of the model it starts from, with the chat
format of that step. Nothing but tokenizers is loaded.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config import EMBEDDED, DataConfig, FrozenModelConfig, ModelUse, StepConfig
from pipeline.hub import cached_file
from pipeline.plan.inputs import is_local
from pipeline.plan.stage import Stage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.data.chat_format import ChatFormat


@dataclass
class Chats:
    """Tokenizers by path, each loaded once."""

    stages: Sequence[Stage]
    """The steps that will run, in order; their outputs need not be there."""

    configs: Mapping[str, StepConfig]

    downloads: bool
    """Whether names on the Hub may be requested; if not, what was not downloaded is unknown."""

    _known: "dict[str, PreTrainedTokenizerBase | None]" = field(default_factory=dict)

    def of_step(self, stage: Stage) -> "ChatFormat | None":
        """The format that a step trains in; None where its tokenizer is not known.

        Raises:
            UserError: there is no tokenizer or no such format, or a model of the step numbers its
                tokens differently or was trained in another format.
        """
        from pipeline.models.chat import require_same_chat, speaks_alike

        config = self.configs[stage.name]
        own, *others = _models(config)
        tokenizer, chat = self._with_format(own.settings, config.data)
        for use in others:
            other = self._of(use.settings)
            if tokenizer is None or other is None:
                continue
            if own.scores and chat is not None and chat.begins_with_cls:
                continue  # an encoder reads the actor's responses as text
            if use.scores and not use.learns:  # it may read text instead of the actor's tokens
                speaks_alike(tokenizer, other, str(use.settings.path))
            else:
                name = "the reward model" if own.scores else "the actor"
                require_same_chat(tokenizer, other, name, use.settings)
        return chat

    def tokenizer_of(self, stage: Stage) -> "PreTrainedTokenizerBase | None":
        """That of the model which a step trains without a format; None where it is not known.

        Raises:
            UserError: there is none.
        """
        own, *_ = _models(self.configs[stage.name])
        return self._of(own.settings)

    def _with_format(
        self, model: FrozenModelConfig, data: DataConfig
    ) -> "tuple[PreTrainedTokenizerBase | None, ChatFormat | None]":
        """As `pipeline.models.chat.load_chat`, for a model that may not be there yet."""
        from pipeline.data.resolve_format import resolve_format

        tokenizer = self._of(model)
        if tokenizer is None:
            return None, None
        tokenizer = copy.deepcopy(tokenizer)
        chat = resolve_format(tokenizer, data.format, data.template_args, data.template_date)
        chat.add_new_tokens()
        chat.attach(tokenizer)
        return tokenizer, chat

    def _of(self, model: FrozenModelConfig) -> "PreTrainedTokenizerBase | None":
        path = str(model.path)
        if path not in self._known:
            self._known[path] = self._load(model, path)
        return self._known[path]

    def _load(self, model: FrozenModelConfig, path: str) -> "PreTrainedTokenizerBase | None":
        from pipeline.models.load import load_tokenizer

        maker = self._maker(path)
        if maker is not None:
            config = self.configs[maker.name]
            start, *_ = _models(config)
            if not config.reads_dialogues:
                return self._of(start.settings)
            return self._with_format(start.settings, config.data)[0]
        if not self.downloads and not _has_tokenizer(path):
            return None
        return load_tokenizer(model)

    def _maker(self, path: str) -> Stage | None:
        """The step of the plan that makes the model."""
        outputs = {self.configs[stage.name].output_dir: stage for stage in self.stages}
        return outputs.get(Path(path))


def is_here(path: str) -> bool:
    """Whether a model's small files can be read without the network."""
    return path == EMBEDDED or is_local(path) or _has_cached_tokenizer(path)


def _has_tokenizer(path: str) -> bool:
    """Whether a tokenizer is here; a directory to plan with needs a configuration alone."""
    directory = Path(path).expanduser()
    return is_here(path) and (
        not directory.is_dir() or any(directory.glob("token*")) or any(directory.glob("*.model"))
    )


def _has_cached_tokenizer(name: str) -> bool:
    return cached_file(name, "tokenizer_config.json") is not None


def _models(config: StepConfig) -> list[ModelUse]:
    """The step's models whose tokens must be the same, the one that learns first.

    Not among them is one that the step only compares with: it does without where that can't be.
    """
    workload = config.workload(1)
    uses = [use for use in workload.models if use.settings.path and use not in workload.compared]
    return sorted(uses, key=lambda use: not use.learns)
