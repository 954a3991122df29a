"""A step that trains nothing; the file TOY_TABLE contains its speed or failure."""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.budget.fit import trained_models
from pipeline.cli.options import parse_step, run_main
from pipeline.system.errors import DataError
from train import STAGES


def main(argv: Sequence[str]) -> None:
    out = Path(argv[1]).parent  # --config .../<step>/config.yaml
    (stage,) = (stage for stage in STAGES if stage.name == out.name)
    config = parse_step(stage.config_class, argv)
    (model, *_) = trained_models(config).values()
    table = Path(os.environ["TOY_TABLE"])
    with table.with_name("started").open("a") as file:
        file.write(f"{stage.name} {config.micro_batch_size} {model.path}\n")
    recomputes = "recomputed" if model.gradient_checkpointing else "kept"
    speed = json.loads(table.read_text())[f"{config.micro_batch_size} {recomputes}"]
    match speed:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "out of memory":
            raise MemoryError("cannot allocate 7 GiB")
        case "refused":
            raise DataError("rows.jsonl line 3 has no prompt")
        case "interrupted":
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(60)
    assert config.max_steps is not None
    lines = [{"step": 0, "eval_perplexity": 9.0}]
    for step in range(1, config.max_steps + 1):
        rate = speed if step > 2 else 1.0  # the first two steps are slow
        lines.append({"step": step, "tokens_per_second": rate, "memory_gb": 0.5})
    (out / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (out / "config.json").write_text("{}")
    result = {"seconds": 1.5, "steps": 2, "tokens": 30, "eval": {"perplexity_after": 4.0}}
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    sys.exit(run_main(main))
