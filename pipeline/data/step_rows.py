"""The rows of a running step: the same on every process, and recorded for the steps after it."""

from pipeline.config import StepConfig
from pipeline.data.prompt_record import PromptRecord, earlier_prompts
from pipeline.data.stages import StageData, load_examples, of_one_kind
from pipeline.parallel.mesh import current_mesh


def load_step_rows(config: StepConfig, *, step: int) -> StageData:
    """The examples of the step, apart from what the steps before it trained on and held out.

    Raises:
        DataError: as `load_examples`; or the record of an earlier step is damaged.
    """
    data = load_examples(
        config.data,
        step=step,
        seed=config.seed,
        earlier=known_prompts(config),
        kept=config.row_columns,
        share=config.row_share,
    )
    return of_one_kind(data, config)


def known_prompts(config: StepConfig) -> PromptRecord:
    """The prompts of the steps before, as the main process finds their records.

    On other machines the directories may be incomplete.
    """
    mesh = current_mesh()
    found = mesh.world.gather_objects(earlier_prompts(config) if mesh.is_main else None)[0]
    return found or PromptRecord()


def record_prompts(prompts: PromptRecord, config: StepConfig) -> None:
    """Leave the prompts of this step and the earlier ones in its output directory."""
    if current_mesh().is_main:
        prompts.write(config.output_dir)
