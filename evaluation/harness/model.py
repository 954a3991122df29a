"""A model for EleutherAI's harness, which calls it `rlhf`."""

from typing import TYPE_CHECKING

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from evaluation.likelihoods import TextModel

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]


@register_model("rlhf")
class HarnessModel(LM):
    """A model of the harness.

    Args:
        path: model directory or Hub id.
        batch_size: sequences in a batch; `auto` is 8.
        device: not read: the GPU is used where there is one.
        max_batch_size: not read.
    """

    def __init__(
        self,
        path: str,
        *,
        batch_size: int | str = 8,
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        del device, max_batch_size
        size = str(batch_size)
        self.text_model = TextModel(path, batch_size=int(size) if size.isdigit() else 8)

    def loglikelihood(
        self,
        requests: "list[Instance]",
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002  # the harness's own signature
    ) -> list[tuple[float, bool]]:
        """Log P of each (context, continuation) in nats, and whether greedy decoding gives it."""
        del disable_tqdm
        pairs = [(str(each.args[0]), str(each.args[1])) for each in requests]
        return self.text_model.loglikelihoods(pairs)

    def loglikelihood_rolling(
        self,
        requests: "list[Instance]",
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002  # the harness's own signature
    ) -> list[float]:
        """Log-probability of each whole text, in nats."""
        del disable_tqdm
        return self.text_model.rolling_loglikelihoods([str(each.args[0]) for each in requests])

    def generate_until(
        self,
        requests: "list[Instance]",
        disable_tqdm: bool = False,  # noqa: FBT001, FBT002  # the harness's own signature
    ) -> list[str]:
        """What follows each context."""
        del disable_tqdm
        return self.text_model.continuations(
            [(str(each.args[0]), dict(each.args[1])) for each in requests]
        )

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness tells its caches apart."""
        return str(self.text_model.tokenizer.name_or_path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str:  # noqa: FBT001, FBT002
        """The template that `--apply_chat_template` uses: the model's own."""
        return str(self.text_model.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002
    ) -> str:
        """A dialogue as text, in the chat format that the model was saved with."""
        text = self.text_model.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)
