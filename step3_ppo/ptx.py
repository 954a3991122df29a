"""PPO-ptx: a language-model loss beside PPO (Ouyang et al. 2022, eq. 2)."""

from pipeline.data.batches import RowStream, TokenBatch, collate_part, micro_batches
from pipeline.data.chat.chat_format import ChatFormat
from pipeline.data.sharing.prompts import PromptRecord
from pipeline.data.sharing.steps import load_examples, record_prompts
from pipeline.parallel.device import local_device
from pipeline.parallel.mesh import current_mesh
from step3_ppo.config import PPOConfig


def open_ptx(chat: ChatFormat, config: PPOConfig, prompts: PromptRecord) -> "PtxStream | None":
    """The batches of PPO-ptx if it is on; writes the record of all prompts of the step.

    Args:
        chat: how dialogues are encoded.
        config: of the step.
        prompts: what PPO and the earlier steps train on and hold out.
    """
    ptx = PtxStream(chat, config, prompts) if config.ptx_coef > 0 else None
    record_prompts(prompts | ptx.trained if ptx else prompts, config)
    return ptx


class PtxStream:
    """Batches of dialogues or plain text, as large as PPO's minibatches.

    Rows longer than `config.data.max_length`, which must fit the actor's context, lose their end.
    """

    def __init__(
        self, chat: ChatFormat, config: PPOConfig, apart: PromptRecord | None = None
    ) -> None:
        """`apart` has the prompts that PPO and earlier steps hold out; they are not trained on."""
        self.chat = chat
        self.config = config
        rows = config.ptx_rows or config.data
        held_out = PromptRecord(held_out=(apart or PromptRecord()).held_out)
        data = load_examples(rows, step=1, seed=config.seed, earlier=held_out)
        self.examples = data.train
        self.trained = PromptRecord(trained=data.prompts.trained)
        self.rows = RowStream(
            num_rows=len(self.examples), batch_size=config.batch_size, seed=config.seed
        )

    def state_dict(self) -> dict[str, int]:
        """The stream's position."""
        return self.rows.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at another stream's position."""
        self.rows.load_state_dict(state)

    def __next__(self) -> tuple[list[TokenBatch], int]:
        """This process's micro-batches, and the targets of all processes."""
        data = self.config.data
        encoded = [
            self.chat.encode(example.prompt, example.chosen, train_on=data.train_on).head(
                data.max_length
            )
            for example in (self.examples[row] for row in next(self.rows))
        ]
        group = current_mesh().data
        parts = micro_batches(
            [len(row) for row in encoded],
            max_tokens=self.config.micro_batch_size * data.max_length,
            num_processes=group.size,
            process=group.rank,
        )
        batches = [
            collate_part([encoded[row] for row in part], spare=encoded[0]).to(local_device())
            for part in parts
        ]
        return batches, max(1, sum(row.num_targets for row in encoded))
