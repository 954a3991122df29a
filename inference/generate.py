"""Respond to prompts: `python -m inference.generate --path DIR --prompts IN --out OUT`.

Reads a JSON object per line, `{"prompt": "..."}` or `{"messages": [...]}`, and writes one for each,
in order, with the prompt, the line's other columns, and the responses: their texts (`answers`),
`token_ids`, `logprobs` and stop reasons (`stop`); with `--top-logprobs`, also the most likely
tokens at each position (`top_token_ids`, `top_logprobs`). OUT appears once it is complete; until
then its lines are in a partial file next to it, from which the same command continues.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from inference.settings import ModelOptions
from pipeline.cli.options import parse_command, run_main
from pipeline.files.durable import check_writable
from pipeline.report.results import find_model
from pipeline.system.errors import require
from pipeline.system.installation import MODULE


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(ModelOptions):
    """Settings of the model, the prompts and the sampling of responses."""

    prompts: Path = Path()
    """Prompt file, one JSON object per line."""

    out: Path = Path()
    """Output file for the responses, one JSON object per line."""

    max_new_tokens: int = 64
    temperature: float = 0.0

    samples: int = 1
    """Number of responses per prompt."""

    top_logprobs: int = 0
    """Number of most likely tokens to store with each response token, with their log-probabilities
    at temperature 1, for distillation (docs/methods.md)."""

    raw: bool = False
    """Treat prompts as text to continue, without a chat template."""

    stop: tuple[str, ...] = ()
    """Stop strings; a response ends before the first one."""

    batch_size: int = 32
    """Number of responses generated at once; it does not affect their content."""

    cache_gib: float | None = None
    """Memory for keys and values, in GiB; null uses 90% of free GPU memory or half of free RAM."""

    seed: int = 0
    """The same seed gives the same responses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.prompts != Path(), "--prompts is missing: pass a prompt file")
        require(self.out != Path(), "--out is missing: pass the file to write")
        sizes = {"samples": self.samples, "batch-size": self.batch_size}
        for name, size in {**sizes, "cache-gib": self.cache_gib}.items():
            require(size is None or size > 0, f"--{name} must be positive, got {size}")
        require(self.top_logprobs >= 0, "--top-logprobs must be at least 0")
        # Step 1 trains the student on prompts in its chat template.
        require(not (self.raw and self.top_logprobs), "--top-logprobs can't be used with --raw")
        require(all(self.stop), "--stop strings must not be empty")


def main(argv: Sequence[str]) -> None:
    """Respond to the prompts.

    Raises:
        UserError: a setting is wrong, the path contains no model, or a line is not a prompt.
    """
    config = parse_command(
        GenerateConfig,
        argv,
        usage=f"{MODULE} inference.generate --path DIR --prompts IN.jsonl --out OUT.jsonl"
        " [--SETTING VALUE ...]",
        about="Respond to the prompts in a file (see docs/report.md).",
        aliases={"slots": "batch_size"},
    )

    from inference.responses import Responder, read_prompts, write_responses
    from pipeline.models.hf.load import load_for_inference
    from pipeline.system.logs import configure_logging

    configure_logging(is_main=True)
    check_writable(config.out, config.prompts, option="--out")
    prompts = read_prompts(config.prompts)
    path = find_model(config.path, config.method)
    model, tokenizer = load_for_inference(path, precision=config.precision)
    responder = Responder(
        model,
        tokenizer,
        config.sampling(config.seed),
        raw=config.raw,
        num_samples=config.samples,
        num_top=config.top_logprobs,
        stop_strings=config.stop,
        cache_bytes=None if config.cache_gib is None else int(config.cache_gib * 2**30),
    )
    write_responses(responder, prompts, config.out, model_path=path, batch_size=config.batch_size)
    logging.getLogger(__name__).info("responses to %d prompts are in %s", len(prompts), config.out)


if __name__ == "__main__":
    run_main(main)
