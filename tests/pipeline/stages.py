"""The steps as train.py names them, each run by the toy step where a test runs them."""

from dataclasses import replace

from pipeline.plan.stage import without_unchosen
from train import STAGES

TOY_STAGES = tuple(replace(stage, module="tests.pipeline.toy_step") for stage in STAGES)
THREE_STEPS = without_unchosen(STAGES, (1, 2, 3), ())
"""As a run without step 0 has them."""
