"""The steps of train.py, and the same steps run by the toy step."""

from dataclasses import replace

from pipeline.plan.stage import drop_unselected
from train import STAGES

TOY_STAGES = tuple(replace(stage, module="tests.pipeline.toy_step") for stage in STAGES)
THREE_STEPS = drop_unselected(STAGES, (1, 2, 3), ())
"""The steps of a run without step 0."""
