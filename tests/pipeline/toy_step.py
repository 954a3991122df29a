"""A step that trains nothing: it leaves what a real one leaves, or ends as TOY says."""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli import parse_step, run_main, write_config
from pipeline.errors import DataError
from train import STAGES


def main(argv: Sequence[str]) -> None:
    out = Path(argv[1]).parent  # --config OUT/<step>/config.yaml
    (stage,) = (stage for stage in STAGES if stage.name == out.name)
    config = parse_step(stage.config_class, argv)
    match os.environ.get("TOY"):
        case "wrong input":
            raise DataError("rows.jsonl line 3 has no prompt")
        case "crash":
            os._exit(7)
        case "killed":
            os.kill(os.getpid(), 9)
        case "out of memory":
            with (out / "tried").open("a") as tried:
                tried.write(f"{config.micro_batch_size} ")
            if config.micro_batch_size > int(os.environ["FITS"]):
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
