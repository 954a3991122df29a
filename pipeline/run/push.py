"""Upload of a run's model to the Hugging Face Hub, with a model card (`--push-to-hub`)."""

import shlex
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

import yaml

from pipeline.cli.options import print_error, print_output
from pipeline.config import EMBEDDED
from pipeline.data.rows.sources import bare_name, is_hub_name
from pipeline.plan.inputs import is_local
from pipeline.plan.output import RECORDS, recorded_base_model
from pipeline.plan.plan import Plan
from pipeline.report import results
from pipeline.system.errors import EXIT_FAILED, one_line


def push_model(plan: Plan) -> None:
    """Upload the last model, or the best one of several methods, if `--push-to-hub` is set.

    Raises:
        SystemExit: the upload failed; the message gives the command to retry it.
    """
    name, out = plan.request.push_to_hub, plan.request.output_dir
    if name is None:
        return
    from huggingface_hub import HfApi

    steps = results.read_results(out).steps
    step, best = steps[plan.stages[-1].name], results.find_chat_model(steps)
    step = best if best is not None and best.stage == step.stage else step
    directory = results.model_directory(out, step)
    card = directory / "README.md"
    if not card.exists():
        earlier = [other for other in steps.values() if other.finished and other.stage < step.stage]
        card.write_text(model_card(name, directory, [*earlier, step]), encoding="utf-8")
    try:
        repository = HfApi().create_repo(name, private=True, exist_ok=True)
        options = {"repo_id": repository.repo_id, "ignore_patterns": list(RECORDS)}
        HfApi().upload_folder(folder_path=directory, **options)
    except Exception as error:  # noqa: BLE001  # the client may raise anything
        files = [str(file.relative_to(directory)) for file in directory.rglob("*")]
        excluded = [pattern for pattern in RECORDS if any(fnmatch(f, pattern) for f in files)]
        words = ["hf", "upload", name, str(directory), ".", "--private"]
        command = shlex.join([*words, *(f"--exclude={pattern}" for pattern in excluded)])
        print_error(f"{directory} was not uploaded: {one_line(error)}; to retry, run `{command}`")
        raise SystemExit(EXIT_FAILED) from None
    print_output(f"hub      {repository}")


def model_card(name: str, directory: Path, steps: Sequence[results.StepResult]) -> str:
    """Return the text of README.md for the model in `directory`, which `steps` produced."""
    config = (directory / "config.json").read_text("utf-8")
    task = "text-classification" if "SequenceClassification" in config else "text-generation"
    base = recorded_base_model(str(directory))
    is_public = base != EMBEDDED and not is_local(base)
    data = [_data_names(step) for step in steps]
    on_hub = {"/".join(path.split("/")[:2]) for paths in data for path in paths if "/" in path}
    metadata: dict[str, object] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "base_model": base if is_public else None,
        "datasets": sorted(on_hub) or None,
        "tags": ["rlhf-pipeline", *(step.method for step in steps)],
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    rows = []
    for step, paths in zip(steps, data, strict=True):
        known = {name: results.finite(value) for name, value in step.eval.items()}
        metrics = [f"{name} {value:.4g}" for name, value in known.items() if value is not None]
        cells = (step.name, step.method, ", ".join(paths), step.steps, step.tokens)
        rows.append(f"| {' | '.join(map(str, cells))} | {', '.join(metrics)} |")
    adapter = "\nThe weights include the LoRA adapter in `adapter`.\n"
    return "\n".join(
        [
            f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n\n# {name.rpartition('/')[2]}\n",
            f"Trained with rlhf-pipeline from {base if is_public else Path(base).name}.\n",
            "| step | method | data | optimizer steps | tokens | evaluation |",
            *("| --- | --- | --- | --- | --- | --- |", *rows),
            adapter if (directory / "adapter").is_dir() else "",
            "```python\nfrom transformers import pipeline\n",
            f'model = pipeline("{task}", "{name}")\n```\n',
        ]
    )


def _data_names(step: results.StepResult) -> list[str]:
    """Return the names of the step's data sets, without weights, splits or local directories."""
    paths = step.settings.get("data.path")
    paths = map(str, paths) if isinstance(paths, list) else ()
    return [name if is_hub_name(name) else Path(name).name for name in map(bare_name, paths)]
