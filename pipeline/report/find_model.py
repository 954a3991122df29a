"""Which model is meant where the output directory of a whole run is named."""

from pathlib import Path

from pipeline.cli import remark
from pipeline.errors import DataError, ModelError
from pipeline.report.choice import model_to_talk_to
from pipeline.report.read import read_results
from pipeline.report.results import StepResult


def find_model(path: str, method: str | None = None) -> str:
    """`path`, or where it is the output directory of `train.py` the furthest model in there.

    Of methods that ran side by side it is the one whose model did best on held-out prompts; which
    one, and how to take another, is written to standard error.

    Args:
        path: a model directory, an output directory, or a name on the Hub.
        method: takes the model of this one.

    Raises:
        ModelError: the run has no model yet, or none of this method.
    """
    out = Path(path).expanduser()
    steps = {} if (out / "config.json").is_file() else _steps(out)
    if not steps:
        if method is not None:
            raise ModelError(
                f"--method chooses among the models of a run, and {path} is not an output directory"
                " of one; leave it out"
            )
        return path
    chosen = model_to_talk_to(steps)
    if chosen is None:
        raise ModelError(f"{path} has no finished model yet; finish its steps with --resume")
    beside = [each for each in steps.values() if each.stage == chosen.stage and each.finished]
    if method is not None:
        of_method = [each for each in beside if each.method == method]
        if not of_method:
            has = ", ".join(each.method for each in beside)
            raise ModelError(f"--method {method}: {path} has no finished model of it; it has {has}")
        chosen = of_method[0]
    others = ", ".join(each.method for each in beside if each is not chosen)
    hint = f"; --method takes another: {others}" if others and method is None else ""
    model = _model_of(out, chosen)
    remark(f"the model is {model}{hint}")
    return str(model)


def _steps(out: Path) -> dict[str, StepResult]:
    """What is in an output directory; nothing where it is none."""
    try:
        return dict(read_results(out).steps)
    except DataError:
        return {}


def _model_of(out: Path, step: StepResult) -> Path:
    directory = out / step.name
    return directory if (directory / "config.json").is_file() else directory / "actor"
