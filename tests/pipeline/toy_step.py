"""A step that trains nothing: it writes a real step's files, or fails in the way that TOY names."""

import errno
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.options import parse_step, run_main, write_config
from pipeline.system.errors import DataError, DivergedError
from train import STAGES


def main(argv: Sequence[str]) -> None:
    out = Path(argv[1]).parent  # --config OUT/<step>/config.yaml
    # Each method has a separate directory; those that run here belong to PPO's step.
    stage = next(stage for stage in STAGES if stage.name[:5] == out.name[:5])
    config = parse_step(stage.config_class, argv)
    match os.environ.get("TOY") if os.environ.get("TOY_STEP") in (None, out.name) else None:
        case "diverged":
            (out / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
            (out / "diverged.json").write_text('{"sentence": "the loss is not finite"}')
            raise DivergedError("the loss is not finite")
        case "wrong input":
            raise DataError("rows.jsonl line 3 has no prompt")
        case "crash":
            os._exit(7)
        case "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out / "model.safetensors"))
        case "killed":
            os.kill(os.getpid(), 9)
        case "out of memory" | "too large" as case:
            with (out / "tried").open("a") as file:
                file.write(f"{config.micro_batch_size} ")
            if case == "too large":
                (Path(os.environ["GROUP"]) / "cgroup.procs").write_text(str(os.getpid()))
                assert b"x" * (config.micro_batch_size * 100 * 2**20)
            elif config.micro_batch_size > int(os.environ["FITS"]):
                raise MemoryError("cannot allocate 7 GiB")
        case "sleep":
            (out / "metrics.jsonl").write_text("{}\n")
            time.sleep(60)
    write_config(config, out / "config.yaml")
    (out / "config.json").write_text("{}")
    (out / "deep").mkdir(exist_ok=True)
    (out / "deep" / "weights").write_text(str(config.seed))
    evaluation = {"perplexity_before": 9.0, "perplexity_after": 4.0}
    result = {"seconds": 1.5, "steps": 2, "tokens": 30, "eval": evaluation}
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    run_main(main)
