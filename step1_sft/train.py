"""Step 1: supervised fine-tuning of the actor on demonstrations.

python -m step1_sft.train --config configs/sft/opt-125m.yaml
torchrun --nproc_per_node 2 -m step1_sft.train --config configs/sft/opt-125m.yaml
"""

from pipeline.cli import help_before_imports
from step1_sft.config import SFTConfig

if __name__ == "__main__":
    help_before_imports(SFTConfig)

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from pipeline.budget.start import check_memory
from pipeline.checkpoints import Checkpoints
from pipeline.cli import parse_step, run_main
from pipeline.compute_threads import compute_threads
from pipeline.data.batches import RowStream, TokenBatch, collate_part, micro_batches, num_steps
from pipeline.data.chat_format import ChatFormat
from pipeline.data.examples import Encoded, Example
from pipeline.data.fingerprint import fingerprint
from pipeline.data.lengths import Fit, check_lengths
from pipeline.data.stages import StageData
from pipeline.data.step_rows import load_step_rows, record_prompts
from pipeline.distributed import (
    global_sum,
    global_sums,
    is_main,
    local_device,
    process_group,
    rank,
    world_size,
)
from pipeline.divergence import check_finite, check_start, keeping_best
from pipeline.engine.best import BestWeights
from pipeline.engine.engine import Engine
from pipeline.evaluations import FORWARD_SHARE, evaluation_interval
from pipeline.models.card import Card
from pipeline.models.chat import load_chat
from pipeline.models.export import export, set_stop_tokens
from pipeline.models.forward import Policy
from pipeline.models.trained import evaluating, trained_causal_lm, within_context
from pipeline.random_state import seed_generators
from pipeline.run import Run, configure_logging
from step1_sft.losses import next_token_nll

logger = logging.getLogger(__name__)

METHOD = "Fine-tuned on demonstrations: the responses' tokens alone are learned."


def train(config: SFTConfig) -> Path:
    """Fine-tune the actor; return the directory of the exported model."""
    seed_generators(config.seed + rank())  # of adapter dropout
    tokenizer, chat = load_chat(config.model, config.data)
    data = load_step_rows(config, step=1)
    stream = RowStream(num_rows=len(data.train), batch_size=config.batch_size, seed=config.seed)
    total_steps = num_steps(
        num_rows=len(data.train),
        batch_size=config.batch_size,
        epochs=config.epochs,
        max_steps=config.max_steps,
    )
    with Run(config, name="step1_sft", total_steps=total_steps, is_main=is_main()) as run:
        model = trained_causal_lm(config.model, tokenizer, device=local_device(), seed=config.seed)
        set_stop_tokens(model, chat.stop_ids)
        engine = Engine(
            Policy(model, kernels=config.model.kernels),
            config.model,
            total_steps=total_steps,
            name="actor",
        )
        config = within_context(config, model)
        check_rows(data, chat, config)
        record_prompts(data.prompts, config)
        held_out = encode(data.eval, chat, config)
        every = evaluation_interval(
            config.eval_every,
            total_steps=total_steps,
            cost=FORWARD_SHARE * len(held_out) / config.batch_size,
        )
        best = BestWeights(engine, keep=config.keep_best)
        checkpoints = Checkpoints(
            run,
            engines={"model": engine},
            parts={"stream": stream, "best": best},
            tokenizer=tokenizer,
            data=fingerprint(data.train),
        )
        before = checkpoints.once("before", lambda: perplexity(engine, held_out, config))
        check_start(config.model.path, {"held-out perplexity": before})
        if checkpoints.done == 0:
            best.update(before, step=0)
            run.evaluated(0, perplexity=before)

        def write() -> None:
            export(model, tokenizer, config.output_dir, weights=engine)

        with keeping_best(run, best, write, model=config.model):
            for step in checkpoints.steps(enough=lambda: best.worse_in_a_row == config.patience):
                rows = encode([data.train[row] for row in next(stream)], chat, config)
                learn(engine, rows, run, step=step, config=config)
                if step == total_steps or step % every == 0:
                    best.update(perplexity(engine, held_out, config), step=step)
                    run.evaluated(step, perplexity=best.last)
                    check_finite(f"after step {step}", {"held-out perplexity": best.last})

        restored = best.restore()
        write()
        exported = (best.value, best.step) if restored else (best.last, best.last_step)
        run.finish(
            eval={
                "perplexity_before": before,
                "perplexity_after": exported[0],
                "best_step": exported[1],
                "rows": len(data.eval),
            },
            models={".": Card("Chat model", METHOD, config.model.path or "", ("sft",))},
        )
        if exported[1] == 0:
            logger.warning(
                "no evaluation was better than the model before training (perplexity %.4g, in the"
                " end %.4g), whose weights are exported: lower model.optim.lr, now %g",
                before,
                best.last,
                config.model.optim.lr,
            )
    return config.output_dir


def learn(
    engine: Engine, rows: Sequence[Encoded], run: Run, *, step: int, config: SFTConfig
) -> None:
    """Take one optimizer step on the rows, and log it."""
    num_targets = max(1, sum(row.num_targets for row in rows))
    nll = 0.0
    for batch in cut(rows, config):
        loss = next_token_nll(engine(batch, uniform=True).logprobs)
        engine.backward(loss / num_targets)
        nll += loss.item()
    result = engine.step()
    run.log(
        step,
        tokens=sum(len(row) for row in rows),
        loss=global_sum(nll) / num_targets,
        lr=result.lr,
        grad_norm=result.grad_norm,
        skipped=int(result.skipped),
    )


def encode(examples: Sequence[Example], chat: ChatFormat, config: SFTConfig) -> list[Encoded]:
    """Token ids and loss masks; what is longer than `max_length` loses its end."""
    return [
        chat.encode(example.prompt, example.chosen, train_on=config.data.train_on).head(
            config.data.max_length
        )
        for example in examples
    ]


def check_rows(data: StageData, chat: ChatFormat, config: SFTConfig) -> None:
    """Say how many rows are cut; raise DataError where nothing is left to train or evaluate."""
    limit = config.data.max_length

    def fit(examples: Sequence[Example]) -> list[Fit]:
        rows = [chat.encode(each.prompt, each.chosen, config.data.train_on) for each in examples]
        return [Fit(len(row) > limit, row.head(limit).num_targets) for row in rows]

    for name, examples in (("training rows", data.train), ("evaluation rows", data.eval)):
        check_lengths(
            examples,
            fit,
            config.data,
            name=name,
            end="end",
            empty="have nothing left to train on",
        )


def cut(rows: Sequence[Encoded], config: SFTConfig) -> list[TokenBatch]:
    """This process's micro-batches of the rows."""
    deterministic = config.model.zero.reduction == "deterministic"
    parts = micro_batches(
        [len(row) for row in rows],
        max_tokens=config.micro_batch_size * config.data.max_length,
        num_processes=world_size(),
        process=rank(),
        at_least=math.ceil(len(rows) / config.micro_batch_size) if deterministic else None,
    )
    return [
        collate_part([rows[row] for row in part], spare=rows[0]).to(local_device())
        for part in parts
    ]


def perplexity(engine: Engine, rows: Sequence[Encoded], config: SFTConfig) -> float:
    """Exp of the mean negative log-likelihood of the held-out target tokens."""
    nll, num_targets = 0.0, 0
    with evaluating(engine.model):
        for batch in cut(rows, config):
            nll += next_token_nll(engine(batch).logprobs).item()
            num_targets += batch.num_targets
    total_nll, total_targets = global_sums([nll, num_targets])
    return math.exp(min(total_nll / max(1.0, total_targets), 700.0))


def main(argv: Sequence[str]) -> None:
    """Parse the settings and run the step on the processes that torchrun started."""
    config = parse_step(SFTConfig, argv)
    check_memory(config, section="sft")
    with compute_threads(config.threads), process_group(config.timeout_seconds):
        configure_logging(is_main=is_main())
        train(config)


if __name__ == "__main__":
    run_main(main)
